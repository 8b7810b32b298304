"""What every schedule must do, the ones added later included."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from plain_simulator import peak, simulate

from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.makespans import makespans
from trainwright.schedules.messages import check_messages, with_messages
from trainwright.schedules.replay import in_flight, schedule
from trainwright.schedules.torch_csv import read_csv, write_csv

NAMES = sorted(SCHEDULES)
SIZES = [(1, 2), (2, 4), (2, 6), (4, 2), (5, 3), (4, 4), (3, 6), (3, 12), (4, 8), (4, 16), (6, 12), (8, 16)]


def tables(name, sizes=SIZES):
    entry = SCHEDULES[name]
    for p, m in sizes:
        for v in (2, 3) if entry.chunks == "many" else (entry.default_chunks,):
            with contextlib.suppress(SpecError):
                yield entry.table(p, m, v)


def test_the_schedules_are_all_there():
    wanted = [
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "combined-1f1b",
        "zb-h1",
        "zb-h2",
        "interleaved-zb1p",
        "zb-v",
    ]
    assert {*wanted, "v-half", "v-min", "dualpipe", "dualpipe-v"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_microbatch_passes_each_stage_once_each_way(name):
    for table in tables(name):
        place = table.placement
        seen: Counter = Counter()
        for rank, actions in enumerate(table.lists):
            for action in actions:
                for piece in action.parts or (action,):
                    assert place.rank_of(piece.stage, piece.microbatch) == rank
                    for part in {"F": "F", "I": "I", "W": "W", "B": "IW"}[piece.kind]:
                        seen[part, piece.stage, piece.microbatch] += 1
        assert seen == Counter((k, s, m) for k in "FIW" for s in range(place.stages) for m in range(place.microbatches))


@pytest.mark.parametrize("name", NAMES)
def test_replay_equals_the_plain_simulator(name):
    for table in tables(name):
        place = table.placement
        draw = np.random.default_rng(7).integers(1, 9, size=(4, place.stages, place.microbatches)).astype(float)
        column = {"F": draw[0], "I": draw[1], "W": draw[2], "B": draw[1] + draw[2]}
        got = schedule(table, forward=draw[0], backward=draw[1], weight=draw[2], p2p=0.75, overlap=0.875)
        want = simulate(table, lambda k, s, m, c=column: c[k][s, m], latency=0.75, overlap=0.875)
        for row in range(len(table)):
            key = ("FIWB"[table.kind[row]], int(table.stage[row]), int(table.microbatch[row]))
            assert (got.row_start[row], got.row_end[row]) == pytest.approx(want[key], abs=1e-9), key
        assert got.peak_per_rank == pytest.approx([peak(table, r) for r in range(place.ranks)])


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_is_explained_and_the_critical_path_fills_the_step(name):
    for table in tables(name):
        got = schedule(table, forward=2, backward=3, weight=1, p2p=0.5)
        assert sum(got.idle_by_cause.values()) == pytest.approx(got.idle)
        assert min(got.idle_by_cause.values()) > -1e-9
        assert sum(g.end - g.start for g in got.gaps) == pytest.approx(got.idle)
        path = got.critical_path
        assert got.row_start[path[0]] == 0
        assert got.row_end[path[-1]] == got.makespan
        hops = got.row_start[path[1:]] - got.row_end[path[:-1]]
        assert set(np.round(hops, 9)) <= {0.0, 0.5}, "each action on the path starts when the one before ends, or a message later"


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_peaks_where_the_list_says_and_ends_empty(name):
    for table in tables(name):
        got = schedule(table, forward=1, backward=2, weight=1)
        for rank in range(got.stages):
            _, held = got.memory_curve(rank)
            assert held.max() == pytest.approx(got.peak_per_rank[rank])
            assert held[-1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_torch_csv_round_trip(name):
    for table in tables(name):
        back = read_csv(write_csv(table))
        assert back.lists == table.lists
        assert schedule(back, forward=1, backward=2, weight=1).makespan == schedule(table, forward=1, backward=2, weight=1).makespan


@pytest.mark.parametrize("name", NAMES)
def test_messages_can_be_ordered_without_deadlock(name):
    for table in tables(name, SIZES[:8]):
        programs = with_messages(table)
        check_messages(programs, table.placement)
        sent = sum(str(item).count("SEND") for program in programs for item in program)
        assert sent == schedule(table).messages
        assert read_csv("\n".join(",".join(map(str, p)) for p in programs)).lists == table.lists


@pytest.mark.parametrize("name", NAMES)
def test_quick_entries_agree_with_the_replay(name):
    for table in tables(name):
        p, m, v = table.placement.ranks, table.placement.microbatches, table.placement.chunks
        full = schedule(name, p, m, v, forward=3, backward=5, weight=2, p2p=0.25)
        free = schedule(name, p, m, v, forward=1, backward=1)
        quick = makespans(name, p, m, v, *(np.array(c) / v for c in ([3, 1], [5, 1], [2, 0])), [0.25, 0.0])
        assert quick == pytest.approx([full.makespan, free.makespan])
        assert in_flight(name, p, v, m, np.arange(p)) == pytest.approx(full.peak_per_rank)
        assert float(in_flight(name, p, v, m)) == pytest.approx(max(full.peak_per_rank))


@pytest.mark.parametrize("name", NAMES)
def test_memory_over_columns_also_with_many_microbatches(name):
    entry = SCHEDULES[name]
    v = entry.default_chunks
    p = np.array([2, 4, 4, 8])
    m = np.array([64, 32, 128, 64])
    want = [max(schedule(name, int(a), int(b), v).peak_per_rank) for a, b in zip(p, m)]
    assert in_flight(name, p, v, m).tolist() == pytest.approx(want)


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_refused_by_name(name):
    for bad in (
        {"stages": 0},
        {"microbatches": -1},
        {"stages": 2.5},
        {"virtual_stages": 0},
        {"virtual_stages": 99 if SCHEDULES[name].chunks != "many" else 1},
    ):
        with pytest.raises(SpecError) as error:
            schedule(name, **{"stages": 4, "microbatches": 8} | bad)
        assert error.value.where in bad
        assert error.value.nearest
    for cost in ("forward", "backward", "weight", "p2p"):
        for value in (-1, float("nan"), float("inf"), "much", [1, 2, 3]):
            with pytest.raises(SpecError):
                schedule(name, 4, 8, **{cost: value})
    with pytest.raises(SpecError):
        schedule(name, 4, 8, forward=0)


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(SpecError, match="1f1b"):
        schedule("1f2b")
    with pytest.raises(SpecError, match="overlap"):
        schedule("1f1b", overlapp=1)
