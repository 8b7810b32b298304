"""What costs do: recomputation, overlap, blocking messages, bandwidth, collectives, stragglers, uneven stages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from trainwright.errors import SpecError
from trainwright.schedules.costs import Costs
from trainwright.schedules.replay import replay, schedule
from trainwright.schedules.torch_csv import read_csv


def test_recomputation_lengthens_the_backward():
    plain, again = schedule("1f1b", 4, 8, forward=1, backward=2), schedule("1f1b", 4, 8, forward=1, backward=2, recompute=1)
    assert again.makespan == schedule("1f1b", 4, 8, forward=1, backward=3).makespan
    assert again.peak_per_rank == plain.peak_per_rank


def test_overlap_makes_pairs_cheaper_but_never_below_the_longer_half():
    """At FB = 0.8(F + B), F = I = W, p = 8, m = 32: combined 1F1B v = 2 90.0 and v = 4 85.8, DualPipe 86.4."""
    unit = {"forward": 1, "backward": 1, "weight": 1, "overlap": 0.8}
    assert schedule("combined-1f1b", 8, 32, 2, **unit).makespan == pytest.approx(90.0)
    assert schedule("combined-1f1b", 8, 32, 4, **unit).makespan == pytest.approx(85.8)
    assert schedule("dualpipe", 8, 32, **unit).makespan == pytest.approx(86.4)
    assert schedule("dualpipe-v", 8, 32, **unit).makespan == pytest.approx(86.8)
    assert schedule("dualpipe", 4, 8, forward=1, backward=9, overlap=0.1).makespan > 8 * 9


def test_latency_and_bandwidth_make_one_message():
    by_latency = schedule("1f1b", 4, 8, p2p=0.5)
    by_bandwidth = schedule("1f1b", 4, 8, p2p=0.25, message_bytes=100.0, bandwidth_bytes_per_s=400.0)
    assert by_bandwidth.makespan == by_latency.makespan


def test_blocking_messages_keep_the_sender():
    """A rank in the middle sends both ways for every microbatch: with F = B = 1 and a message of 1 its work doubles."""
    free, blocked = (
        schedule("1f1b", 4, 32, forward=1, backward=1, p2p=1),
        schedule("1f1b", 4, 32, forward=1, backward=1, p2p=1, blocking=True),
    )
    assert blocked.useful == free.useful
    assert blocked.makespan >= 32 * 4
    assert blocked.idle_by_cause["latency"] == pytest.approx(blocked.idle - schedule("1f1b", 4, 32, forward=1, backward=1).idle)


def test_uneven_stages_and_stragglers_are_imbalance():
    even = schedule("1f1b", 4, 16, forward=1, backward=2)
    late = schedule("1f1b", 4, 16, forward=1, backward=2, slowdown=[1, 1, 1.5, 1])
    assert late.idle_by_cause["imbalance"] > 0
    assert even.idle_by_cause["imbalance"] == 0
    assert late.makespan == schedule("1f1b", 4, 16, forward=[1, 1, 1.5, 1], backward=[2, 2, 3, 2]).makespan
    assert late.makespan >= 16 * 4.5


def test_a_slow_microbatch():
    forward = np.ones((4, 8))
    forward[:, 3] = 5.0
    assert schedule("gpipe", 4, 8, forward=forward).makespan == schedule("gpipe", 4, 8).makespan + 4 + 3 * 4


def test_chunks_share_a_ranks_cost():
    by_rank = schedule("interleaved-1f1b", 4, 8, 2, forward=[1, 1, 1, 2], backward=2)
    by_chunk = schedule("interleaved-1f1b", 4, 8, 2, forward=[0.5, 0.5, 0.5, 1] * 2, backward=2)
    assert by_rank.makespan == by_chunk.makespan
    assert by_rank.busy_per_rank.tolist() == [24, 24, 24, 32]


def test_gather_once_delays_the_first_forward_and_reduce_follows_the_last_backward():
    got = schedule("1f1b", 2, 4, forward=1, backward=2, gather=3, reduce=5)
    assert got.row_start[0] == 3
    compute = schedule("1f1b", 2, 4, forward=1, backward=2).makespan
    assert got.makespan == 3 + compute + 5
    assert got.idle_by_cause["collective"] == pytest.approx(2 * 8)
    assert {c.kind for c in got.collectives} == {"gather", "reduce"}
    assert len(got.collectives) == 4


def test_breadth_first_reduces_each_chunk_once_and_hides_it():
    """Lamy-Poirier 2023: with parameters given back, depth-first gathers and reduces a chunk in every round, breadth-first once a pass."""
    cost = {"forward": 1, "backward": 2, "gather": 0.4, "reduce": 0.4, "regather": True}
    deep, broad = schedule("interleaved-1f1b", 4, 32, 2, **cost), schedule("looped-bfs", 4, 32, 2, **cost)
    count = {n: sum(c.kind == "reduce" for c in t.collectives) for n, t in (("deep", deep), ("broad", broad))}
    assert count["broad"] == 4 * 2
    assert count["deep"] > 4 * count["broad"]
    last = {r: broad.end[broad.nodes.first[r + 1] - 1] for r in range(4)}
    hidden = [c for c in broad.collectives if c.kind == "reduce" and c.end <= last[c.rank]]
    assert len(hidden) == 4, "the reduction of one of a rank's two chunks runs beside the other's backward"


def test_collectives_of_a_rank_run_one_at_a_time():
    got = schedule("interleaved-1f1b", 4, 8, 2, gather=2, reduce=2, regather=True)
    for kind in ("gather", "reduce"):
        for rank in range(4):
            spans = sorted((c.start, c.end) for c in got.collectives if c.rank == rank and c.kind == kind)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


def test_activations_may_differ_by_stage():
    table = schedule("1f1b", 2, 4).table
    got = replay(table, Costs(1, 2, 0, activations=[10.0, 3.0]))
    assert got.peak_per_rank == [20.0, 3.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slowdown", [1, 2]),
        ("slowdown", [1, 1, 1, 0]),
        ("overlap", 0),
        ("bandwidth_bytes_per_s", 0),
        ("recompute", -1),
        ("gather", "x"),
        ("activations", [1, 2]),
    ],
)
def test_costs_that_make_no_sense(field, value):
    with pytest.raises(SpecError):
        schedule("1f1b", 4, 8, **{field: value})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0", "rank 1: the input gradient (I or B) of stage 1, microbatch 0 is missing"),
        ("0F0,0F0,0B0\n1F0,1B0", "rank 0, action 1: 0F0 is there 2 times"),
        ("0F0,0B0\n1B0,1F0", "rank 1, action 0: 1B0 comes before 1F0"),
        ("0F0,0I0\n1F0,1I0,1W0", "the weight gradient (W or B) of stage 0, microbatch 0 is missing"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "deadlock: rank 0 at 0B0 waits for rank 1 at 1B0"),
        ("0F0,1B0\n1F0,0B0", "its stage is on rank"),
        ("0F0,0B0,\n2F0,1B0", "3 stages on 2 ranks"),
        ("0F0,0X0\n", "rank 0, cell 1: '0X0' is not an action"),
        ("0F,0B0\n", "names no microbatch"),
        ("(0F1;0F2)OVERLAP_F_B,0B0\n", "not one forward and one whole backward"),
        (",,\n", "no action in it"),
        ("0F99999,0B0\n", "is missing"),
        ("9999999F9999999,0B0\n", "actions"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0", "1F0 comes before 1RECV_F0"),
        (
            "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            "deadlock: rank 0 waits at 0RECV_B0 for rank 1; rank 1 waits at 1RECV_F0 for rank 0",
        ),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0", "0RECV_B0 has no 1SEND_B0"),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
            "would take the wrong tensor",
        ),
    ],
)
def test_what_is_wrong_with_a_users_list_is_named(text, reason):
    with pytest.raises(SpecError) as error:
        read_csv(text)
    assert reason in str(error.value)


def test_a_users_list_may_pause_and_place_stages_freely():
    table = read_csv("1F0,,1F1,,1B0,1B1\n0F0,0F1,,,0B0,0B1\n")
    assert table.placement.kind == "given"
    assert table.placement.mapping == (1, 0)
    assert schedule(table, forward=1, backward=2).makespan == schedule("gpipe", 2, 2).makespan
