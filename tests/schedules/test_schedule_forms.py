"""Published closed forms and golden rows: tests of the lists, never code."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.replay import ends_in_flight, schedule
from trainwright.schedules.timeline import peaks

GOLDEN = list(csv.DictReader((Path(__file__).parent.parent / "data" / "schedules.csv").read_text().splitlines()))
COSTS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))


@pytest.mark.parametrize(
    "row",
    GOLDEN,
    ids=lambda r: (
        f"{r['schedule']}-{r['stages']}-{r['microbatches']}-{r['virtual_stages']}-{r['forward']}{r['backward']}{r['weight']}-{r['p2p']}"
    ),
)
def test_golden_rows(row):
    """Rows whose order equals another implementation's (named in each)."""
    sizes = {k: int(row[k]) for k in ("stages", "microbatches", "virtual_stages")}
    got = schedule(row["schedule"], **sizes, **{k: float(row[k]) for k in ("forward", "backward", "weight", "p2p")})
    for field in ("makespan", "bubble_total", "bubble_useful", "bubble_span"):
        assert getattr(got, field) == pytest.approx(float(row[field]), rel=1e-5, abs=1e-5)
    assert got.peak_per_rank == pytest.approx([float(x) for x in row["peak_per_rank"].split("|")])
    assert got.weight_copies == int(row["weight_copies"])
    assert got.messages == int(row["messages"])


@settings(deadline=None)
@given(p=st.integers(1, 9), m=st.integers(1, 30), costs=COSTS)
def test_gpipe_and_1f1b_have_one_bubble_and_different_memory(p, m, costs):
    """Makespan (m + p - 1)(F + B) for both; 1F1B changes memory only (Narayanan et al. 2021, section 2.2)."""
    f, b, w = costs
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        got = schedule(name, p, m, forward=f, backward=b, weight=w)
        assert got.makespan == (m + p - 1) * (f + b + w)
        assert got.bubble_total == pytest.approx((p - 1) / (m + p - 1))
        assert got.bubble_useful == pytest.approx((p - 1) / m)
    assert schedule("gpipe", p, m).peak_per_rank == [m] * p
    assert schedule("1f1b", p, m).peak_per_rank == [min(m, p - r) for r in range(p)]


@settings(deadline=None)
@given(p=st.integers(1, 6), groups=st.integers(1, 5), v=st.integers(2, 4), costs=COSTS)
def test_interleaving_divides_the_ramp(p, groups, v, costs):
    f, b, w = costs
    m = p * groups
    for name in ("interleaved-1f1b", "looped-bfs"):
        got = schedule(name, p, m, v, f, b, w)
        assert got.makespan == pytest.approx((m + (p - 1) / v) * (f + b + w))
        assert got.messages == 2 * (p * v - 1) * m * (p > 1)
    assert schedule("interleaved-zb1p", p, m, v, 1, 1, 1).makespan == pytest.approx(3 * m + (p - 1) / v)


@settings(deadline=None)
@given(p=st.integers(1, 8), extra=st.integers(0, 12), f=st.integers(1, 9))
def test_zero_bubble_forms(p, extra, f):
    """Qi et al. 2024: ZB-H1 ramps (p-1)(F+I-W); ZB-H2 and ZB-V have no span bubble at F = I = W."""
    m = p + extra
    assert schedule("zb-h1", p, m, forward=f, backward=f, weight=f).makespan == 3 * f * m + (p - 1) * f
    m = 2 * p + extra
    two = schedule("zb-h2", p, m, forward=f, backward=f, weight=f)
    assert two.bubble_span == pytest.approx(0, abs=1e-12)
    assert two.makespan == 3 * f * m + (p - 1) * f
    back = schedule("zb-v", p, m, 2, f, f, f)
    assert back.bubble_span == pytest.approx(0, abs=1e-12)
    assert back.makespan == pytest.approx(3 * f * m + (p - 1) * f / 2)
    assert back.peak_per_rank == [p] * p


@settings(deadline=None)
@given(half=st.integers(1, 4), extra=st.integers(0, 6))
def test_dualpipe_forms_at_equal_costs(half, extra):
    """The DualPipe README's bubbles, (p/2-1)(FB+B-3W) and half of (p-1)(FB+B-3W), exact at F = I = W and FB = F + B."""
    p, m = 2 * half, 4 * half + 2 * extra
    assert schedule("dualpipe", p, m, forward=1, backward=1, weight=1).makespan == 3 * m + (half - 1) * 2
    assert schedule("dualpipe-v", p, m, 2, 1, 1, 1).makespan == 3 * m + (p - 1)


@settings(deadline=None)
@given(
    p=st.integers(2, 5),
    groups=st.integers(2, 5),
    v=st.integers(2, 4),
    costs=COSTS,
    overlap=st.sampled_from([0.75, 0.875, 1.0]),
)
def test_combined_1f1b_form(p, groups, v, costs, overlap):
    """[p(v-1)+1] ramp chunks unpaired and the rest in pairs at the cost FB, on the last rank."""
    f, b, w = costs
    m, whole = p * groups, f + b + w
    pairs = m * v - p * (v - 1) - 1
    assume(overlap * whole >= max(f, b + w))
    want = (p - 1) * whole / v + (p * (v - 1) + 1) * whole / v + pairs * overlap * whole / v
    assert schedule("combined-1f1b", p, m, v, f, b, w, overlap=overlap).makespan == pytest.approx(want)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 32), (8, 16), (8, 64)])
def test_latency_tax(p, m):
    """1F1B pays for latency in every round of p microbatches, eager 1F1B and GPipe once: 2(p-1)m/p + 2(p-2) against
    2(p-1).
    """
    tax = {
        n: (schedule(n, p, m, p2p=0.125).makespan - schedule(n, p, m).makespan) / 0.125 for n in ("1f1b", "zb-h1", "gpipe", "eager-1f1b")
    }
    assert tax["gpipe"] == tax["eager-1f1b"] == 2 * (p - 1)
    assert tax["1f1b"] == 2 * (p - 1) * m / p + 2 * (p - 2)
    assert schedule("1f1b", p, m, p2p=0.125).idle_by_cause["latency"] == pytest.approx(p * 0.125 * tax["1f1b"])


@pytest.mark.parametrize(
    ("name", "sizes", "where", "nearest"),
    [
        ("interleaved-1f1b", (4, 6, 2), "microbatches", "4, 8"),
        ("interleaved-1f1b", (4, 8, 1), "virtual_stages", "2"),
        ("combined-1f1b", (4, 2, 2), "microbatches", "4"),
        ("dualpipe", (3, 8, 1), "stages", "2, 4"),
        ("dualpipe", (4, 9, 1), "microbatches", "10"),
        ("dualpipe", (4, 6, 1), "microbatches", "8"),
        ("dualpipe-v", (4, 7, 2), "microbatches", "8"),
        ("zb-v", (4, 8, 3), "virtual_stages", "2"),
        ("1f1b", (4, 8, 2), "virtual_stages", "1, or the schedule interleaved-1f1b"),
        ("interleaved-zb1p", (4, 9, 2), "microbatches", "8, 10"),
    ],
)
def test_refusals_name_the_rule_and_the_nearest_legal_value(name, sizes, where, nearest):
    with pytest.raises(SpecError) as error:
        schedule(name, *sizes)
    assert (error.value.where, error.value.nearest) == (where, nearest)


def test_fewer_microbatches_than_stages_run_where_the_order_exists():
    for name in ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "looped-bfs", "interleaved-zb1p", "v-half", "v-min"):
        assert schedule(name, 8, 3).makespan > 0


def test_one_rank_never_waits():
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "v-half"):
        got = schedule(name, 1, 4)
        assert (got.makespan, got.idle, got.messages) == (12, 0, 0)


@settings(deadline=None)
@given(p=st.integers(2, 5), v=st.integers(2, 3), groups=st.integers(1, 3), more=st.integers(0, 5), rest=st.integers(0, 9))
def test_groups_of_more_than_one_microbatch_a_rank(p, v, groups, more, rest):
    """Megatron's microbatch_group_size_per_vp_stage: in [p, m], no last group below p; the same makespan, peak (2(p-1-r) + (v-1)g + 1)/v."""
    group = p + more
    m = groups * group + (rest if p <= rest < group else 0)
    got = schedule("interleaved-1f1b", p, m, v, group=group)
    want = [min(m * v, 2 * (p - 1 - r) + (v - 1) * group + 1) / v for r in range(p)]
    assert got.peak_per_rank == pytest.approx(want)
    assert got.makespan == pytest.approx((m + (p - 1) / v) * 3)


@pytest.mark.parametrize(("m", "group", "nearest"), [(8, 3, "4, 8"), (10, 16, "6, 10"), (10, 9, "6, 10"), (10, 8, "6, 10")])
def test_groups_that_megatron_refuses(m, group, nearest):
    with pytest.raises(SpecError) as error:
        schedule("interleaved-1f1b", 4, m, 2, group=group)
    assert error.value.where == "group"
    for good in error.value.nearest.split(", "):
        schedule("interleaved-1f1b", 4, m, 2, group=int(good))
    with pytest.raises(SpecError, match="no groups"):
        schedule("1f1b", 4, 8, group=4)


def test_bigger_groups_hide_latency_between_chunks():
    """With g = p the first chunk's last microbatch and the next chunk's first are back to back round the ring; a larger group gives messages time."""
    small, large = (schedule("interleaved-1f1b", 4, 16, 2, p2p=0.2, group=g) for g in (4, 8))
    assert large.makespan < small.makespan
    assert max(large.peak_per_rank) > max(small.peak_per_rank)


@pytest.mark.parametrize("name", sorted(n for n, e in SCHEDULES.items() if e.in_flight))
def test_closed_forms_of_memory_at_every_size(name):
    """Every rank, also below the sizes at which the published forms hold."""
    entry = SCHEDULES[name]
    for p in (1, 2, 3, 4, 5, 8):
        for m in range(1, 24):
            for v in (2, 3, 4) if entry.chunks == "many" else (entry.default_chunks,):
                with contextlib.suppress(SpecError):
                    table = entry.table(p, m, v)
                    assert entry.in_flight(p, m, v, np.arange(p)) == pytest.approx(peaks(table, np.full(p * v, 1 / v)))


def open_on(table, stage, until):
    """Micro-batches of a stage and of all stages on its rank, from their forward to one of `until`, while each action of the rank's list runs."""
    rank = int(table.placement.rank_of(stage, 0))
    mine = everyone = 0
    found = []
    for piece in (p for action in table.lists[rank] for p in action.parts or (action,)):
        here = piece.stage == stage
        mine, everyone = mine + (here and piece.kind == "F"), everyone + (piece.kind == "F")
        found.append((mine, everyone))
        mine, everyone = mine - (here and piece.kind in until), everyone - (piece.kind in "WB")
    return np.array(found)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_micro_batches_in_flight_of_the_first_and_the_last_stage(name):
    """Counted on the lists, a chunk of a rank has fewer open than the rank, and has them when the rank has its most."""
    entry = SCHEDULES[name]
    for p in (2, 4, 6):
        for m in (1, 2, p, 2 * p, 2 * p + 2, 5 * p):
            for v in (2, 3) if entry.chunks == "many" else (entry.default_chunks,):
                with contextlib.suppress(SpecError):
                    table = entry.table(p, m, v)
                    last = table.placement.stages - 1
                    for k, (stage, until) in enumerate(((0, "WB"), (last, "WB"), (last, "IB"))):
                        mine, everyone = open_on(table, stage, until).T
                        assert ends_in_flight(name, p, v, m)[k] == mine.max(), (p, m, v, k)
                        assert mine[everyone == everyone.max()].max() == mine.max()


def test_a_chunk_with_the_head_has_one_micro_batch_in_flight_between_its_passes():
    """But where every forward pass comes first, and where a forward pass runs beside a backward pass. Its weight gradients may wait longer."""
    found = {name: ends_in_flight(name, 8, entry.default_chunks, 32) for name, entry in SCHEDULES.items()}
    assert {name for name, ends in found.items() if ends.loss == 32} == {"gpipe", "looped-bfs"}
    assert {name for name, ends in found.items() if 1 < ends.loss < 32} == {"combined-1f1b"}
    assert {name: int(ends.last) for name, ends in found.items() if ends.last > ends.loss} == {
        "zb-h1": 8, "zb-h2": 15, "interleaved-zb1p": 8
    }  # fmt: skip
