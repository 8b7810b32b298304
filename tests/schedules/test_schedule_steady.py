"""Long steps from short ones: the extension equals the full replay, and is refused where the middle has not settled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.schedules import SCHEDULES, makespans
from trainwright.schedules.controllable_memory import all_ranks, half_pattern, lengthened, long_ranks, min_pattern
from trainwright.schedules.replay import schedule
from trainwright.schedules.steady import closure, state, steady

PERIODIC = sorted(n for n, e in SCHEDULES.items() if e.period)


def test_all_but_the_two_with_separate_phases_repeat_themselves():
    assert sorted(set(SCHEDULES) - set(PERIODIC)) == ["gpipe", "looped-bfs"]


@pytest.mark.parametrize("name", PERIODIC)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_the_middle_is_found(name, p):
    middle = steady(name, p, 6 * p, SCHEDULES[name].default_chunks)
    assert middle is not None
    assert middle.microbatches == SCHEDULES[name].period(p)
    assert (
        len(middle.between)
        == (len(steady(name, p, 6 * p + 2 * middle.microbatches, SCHEDULES[name].default_chunks).nodes) - len(middle.nodes)) // 2
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(PERIODIC), p=st.integers(2, 4), extra=st.integers(0, 40))
def test_extension_equals_the_full_replay(data, name, p, extra):
    """Uneven stages and latency, two costs at once: the same makespans as the whole step replayed action by action."""
    v = SCHEDULES[name].default_chunks
    p, g = (2 * (p // 2), SCHEDULES[name].period(p)) if name == "dualpipe" else (p, SCHEDULES[name].period(p))
    m = (14 * p + extra) // g * g
    numbers = st.lists(st.integers(1, 9), min_size=p * v, max_size=p * v)
    f, b, w = (np.array(data.draw(numbers), float) for _ in range(3))
    p2p, blocking = data.draw(st.sampled_from([0.0, 0.3, 2.0])), data.draw(st.booleans())
    costs = [np.stack([c, np.roll(c, 1)], axis=1) for c in (f, b, w)]

    def whole(k: int, late: float) -> float:
        parts = (c[:, k, None] + np.zeros(m) for c in costs)
        return schedule(name, p, m, v, *parts, p2p=late, blocking=blocking).makespan

    bound = makespans.EXTEND_ABOVE
    try:
        makespans.EXTEND_ABOVE = 0
        quick = makespans.makespans(name, p, m, v, *costs, [p2p, 0.5], blocking)
    finally:
        makespans.EXTEND_ABOVE = bound
    assert quick == pytest.approx([whole(0, p2p), whole(1, 0.5)], rel=1e-9)


@pytest.mark.parametrize("name", PERIODIC)
def test_a_very_long_step(name):
    v = SCHEDULES[name].default_chunks
    want = schedule(name, 4, 4096, v, 1, 1, 1)
    assert makespans.makespans(name, 4, 4096, v, 1 / v, 1 / v, 1 / v) == pytest.approx(want.makespan, rel=1e-12)


def test_a_middle_that_has_not_settled_is_not_used():
    middle = steady("1f1b", 4, 24, 1)
    end = np.arange(len(middle.nodes), dtype=float)
    end[middle.after[0]] += 0.5
    assert np.isnan(middle.advance(end))
    assert np.isfinite(middle.advance(np.stack([end, np.arange(len(end))], axis=1))[1])


def test_a_cut_leaves_nothing_before_it_that_waits_for_something_after_it():
    for name in PERIODIC:
        nodes = steady(name, 4, 32, SCHEDULES[name].default_chunks).nodes
        cut = closure(nodes, 6)
        inside = np.zeros(len(nodes) + 1, bool)
        for r, count in enumerate(cut):
            inside[nodes.first[r] : nodes.first[r] + count] = True
        inside[-1] = True  # what is not waited for
        assert inside[nodes.needs[inside[:-1]]].all()
        assert inside[state(nodes, cut)].all()


@pytest.mark.parametrize("pattern", [half_pattern, min_pattern])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_v_schedules_are_lengthened_as_they_would_be_made(pattern, p):
    for m in (4 * p + 5, 6 * p, 9 * p):
        made, longer = all_ranks(pattern(p), m), long_ranks(pattern(p), m)
        assert all(np.array_equal(a, b) for a, b in zip(made, longer))
        assert all(lengthened(x, r, 3) is not None for r, x in enumerate(made))
