"""Bounds, proven optima, list schedules under a cap, and comparison at equal memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_simulator import peak, simulate

from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.actions import Placement
from trainwright.schedules.automatic import Preference, automatic, candidates, make, trade_off
from trainwright.schedules.bounds import bound_of, gap
from trainwright.schedules.compare import Sized, at_equal_memory
from trainwright.schedules.costs import Costs
from trainwright.schedules.optimal import integers, optimal
from trainwright.schedules.replay import schedule

pytest.importorskip("ortools")
UNIT = {"forward": 1.0, "backward": 1.0, "weight": 1.0}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("costs", [(1, 2, 0, 0), (5, 6, 4, 0.5), ([1, 2, 1, 3], [2, 1, 4, 2], [1, 1, 2, 1], 0.25)])
def test_no_schedule_beats_the_bound(name, costs):
    f, b, w, p2p = costs
    got = schedule(name, 4, 8, forward=f, backward=b, weight=w, p2p=p2p)
    bound = bound_of(got)
    assert got.makespan >= bound.makespan - 1e-9
    assert float((got.end[got.nodes.first[1:] - 1] - got.start[got.nodes.first[:-1]]).max()) >= bound.span - 1e-9


def test_which_schedules_attain_the_bound():
    """1F1B is optimal among unsplit orders of one chunk; ZB-H1 and ZB-H2 at F = I = W, ZB-V in its placement."""
    for name in ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v"):
        assert gap(schedule(name, 4, 8, **UNIT)) == pytest.approx(0)
    assert gap(schedule("v-min", 4, 8, **UNIT)) > 0.1
    assert bound_of(schedule("1f1b", 4, 8)).makespan == (8 + 3) * 3


@pytest.mark.parametrize(
    ("costs", "options", "want"),
    [
        ((1, 2, 0, 0), {"split": False}, 33),
        ((1, 1, 1, 0), {}, 27),
        ((1, 1, 1, 0), {"cap": 7, "objective": "span"}, 24),
        ((5, 6, 4, 0), {}, 141),
        ((4, 8, 0, 1), {"split": False}, 148),  # the latency tax of the cap of p microbatches is inherent ...
        ((4, 8, 0, 1), {"split": False, "cap": 5}, 138),  # ... and one more microbatch in flight removes it
    ],
)
def test_proven_optima_at_four_ranks_and_eight_microbatches(costs, options, want):
    f, b, w, p2p = costs
    found = optimal(4, 8, forward=f, backward=b, weight=w, p2p=p2p, time_limit_s=20, **options)
    assert found.proven
    assert found.objective == pytest.approx(want)
    assert found.bound == pytest.approx(want)
    assert max(found.timeline.peak_per_rank) <= options.get("cap", 4)
    if not options.get("objective"):
        seconds = {"F": f, "I": b, "W": w, "B": b + w}
        times = simulate(found.timeline.table, lambda k, s, n: seconds[k], latency=p2p)
        assert max(end for _, end in times.values()) == pytest.approx(want)


def test_optimum_of_a_v():
    found = optimal(2, 4, 2, placement="v", **UNIT, time_limit_s=20)
    assert (found.objective, found.proven) == (12.5, True)


def test_optimal_refuses_what_it_cannot_prove_or_keep():
    with pytest.raises(SpecError, match="too many"):
        optimal(8, 512)
    with pytest.raises(SpecError, match="one microbatch"):
        optimal(4, 4, cap=0.5)


def test_costs_become_whole_numbers():
    import numpy as np

    assert integers(np.array([0.5, 1.25, 3])) == (4, True)
    assert integers(np.array([1.0, 0.1])) == (10, True)
    scale, exact = integers(np.array([np.pi, np.e, 2**0.5]))
    assert not exact
    assert scale > 1000


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 10),
    v=st.integers(1, 2),
    cap=st.integers(2, 10),
    first=st.booleans(),
    deep=st.booleans(),
    patience=st.sampled_from([0.0, 0.5, 1.0]),
    costs=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5)),
    p2p=st.sampled_from([0.0, 0.5]),
)
def test_list_schedules_run_and_keep_their_cap(p, m, v, cap, first, deep, patience, costs, p2p):
    f, b, w = costs
    place = Placement("v" if v == 2 else "loop", p, v, m)
    table = make(place, Costs(f, b, w, latency=p2p), cap / 2 if v == 2 else cap, Preference(first, deep, patience))
    times = simulate(table, lambda k, s, n: {"F": f, "I": b, "W": w}[k], latency=p2p)
    assert len(times) == 3 * p * v * m
    assert max(peak(table, r) for r in range(p)) <= (cap / 2 if v == 2 else cap)


def test_more_memory_never_costs_time():
    front = trade_off(4, 8, **UNIT)
    makespans = [c.objective for _, c in front]
    assert makespans == sorted(makespans, reverse=True)
    assert all(c.peak <= cap for cap, c in front)
    best = dict(front)
    assert best[2.0].objective == 29.5  # V-Min
    assert best[3.0].objective == 26.5  # V-Half
    assert best[4.0].objective == 25.5  # the bound of two chunks a rank


def test_made_for_the_costs_beats_every_hand_made_order_somewhere():
    """Uneven costs, latency, memory of 7: the list scheduler's span is below ZB-H2's."""
    found = candidates(4, 16, 7, forward=5, backward=6, weight=4, p2p=1, objective="span")
    assert found[0].name.startswith("automatic")
    assert found[0].objective < min(c.objective for c in found if c.name == "zb-h2")


def test_two_copies_of_the_weights_only_when_allowed():
    assert "dualpipe" not in {c.name for c in candidates(4, 8, **UNIT)}
    assert "dualpipe" in {c.name for c in candidates(4, 8, **UNIT, weight_copies=2)}
    with pytest.raises(SpecError, match="one microbatch"):
        automatic(4, 8, 0.5)
    with pytest.raises(SpecError, match="objective"):
        automatic(4, 8, objective="speed")


def test_comparison_at_equal_memory():
    """Interleaved needs 5.5 at 8 microbatches; at 12 smaller ones it keeps ZB-V's 4."""
    a, b, note = at_equal_memory(Sized("interleaved-1f1b", 4, 8, 2, UNIT), Sized("zb-v", 4, 8, 2, UNIT))
    assert a.microbatches == 12
    assert max(a.peak_per_rank) <= max(b.peak_per_rank) == 4
    assert a.useful == pytest.approx(b.useful) == pytest.approx(4 * 8 * 3)
    assert "12 microbatches" in note
    a, b, note = at_equal_memory(Sized("1f1b", 4, 8, None, UNIT), Sized("gpipe", 4, 8, None, UNIT))
    assert (a.microbatches, b.microbatches) == (8, 8)
    assert "No size of microbatch" in note
