"""The virtual world: collectives against their meaning and their formulas, deadlocks named, nothing shared by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.simulate.collectives import expected_bytes, split_sizes
from trainwright.simulate.studies.collectives import CASES, perform, right_answer
from trainwright.simulate.world import DeadlockError, World


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("elements", [1, 5, 24, 37])
def test_collectives_mean_what_they_say_and_send_what_the_formula_says(kind, algorithm, ranks, elements):
    messages = [np.random.default_rng(r).standard_normal(elements) for r in range(ranks)]
    world = World(ranks)
    results = world.run(lambda rank: perform(kind, algorithm, rank.group(range(ranks)), messages[rank.index]))
    for me, got in enumerate(results):
        np.testing.assert_allclose(got, right_answer(kind, messages, me), rtol=1e-13, atol=1e-13)
    sent = world.traffic.bytes_by_rank()
    assert [sent.get(r, 0) for r in range(ranks)] == [expected_bytes(kind, elements, 8, ranks, r, algorithm) for r in range(ranks)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ranks=st.integers(2, 12), elements=st.integers(1, 200))
def test_the_textbook_formulas(ranks, elements):
    """Sums over ranks: 2 (n-1) S for either all-reduce, (n-1) S for its halves and for a broadcast; a ring's share of each rank is equal where n divides."""
    total = {
        kind: sum(expected_bytes(kind, elements, 1, ranks, r) for r in range(ranks))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    }
    assert total == {
        "all_reduce": 2 * (ranks - 1) * elements,
        "all_gather": (ranks - 1) * elements,
        "reduce_scatter": (ranks - 1) * elements,
        "broadcast": (ranks - 1) * elements,
    }
    assert sum(expected_bytes("all_reduce", elements, 1, ranks, r, "tree") for r in range(ranks)) == 2 * (ranks - 1) * elements
    even = ranks * elements
    assert {expected_bytes("all_reduce", even, 1, ranks, r) for r in range(ranks)} == {2 * (ranks - 1) * even // ranks}
    assert max(expected_bytes("all_reduce", even, 1, ranks, r, "tree") for r in range(ranks)) <= 2.5 * even + 3


def test_every_member_ends_with_the_same_bits():
    messages = [np.random.default_rng(r).standard_normal(1001) for r in range(7)]
    for algorithm in ("ring", "tree"):
        results = World(7).run(lambda rank, a=algorithm: rank.group(range(7)).all_reduce(messages[rank.index], "x", a))
        assert all((r == results[0]).all() for r in results)


def test_messages_are_copies():
    box = np.zeros(3)

    def program(rank):
        if rank.index == 0:
            rank.send(1, box)
            box[:] = 7
            return None
        return rank.receive(0)

    assert World(2).run(program)[1].tolist() == [0, 0, 0]


def test_a_deadlock_is_named():
    def program(rank):
        return rank.receive(1 - rank.index, "the other's")

    with pytest.raises(DeadlockError, match="rank 0 waits for the other's from rank 1; rank 1 waits"):
        World(2).run(program)


def test_a_collective_that_one_rank_leaves_out_is_named():
    with pytest.raises(DeadlockError, match="all_reduce"):
        World(3).run(lambda rank: rank.group(range(3)).all_reduce(np.ones(2), "sum") if rank.index else None)


def test_different_collectives_of_one_group_are_named():
    def program(rank):
        group = rank.group(range(2))
        return group.all_reduce(np.ones(2)) if rank.index else group.all_gather(np.ones(2))

    with pytest.raises(DeadlockError, match="where others of group"):
        World(2).run(program)


def test_an_error_of_one_rank_stops_all():
    def program(rank):
        if rank.index == 2:
            raise ValueError("rank 2 is ill")
        return rank.group(range(3)).all_reduce(np.ones(1))

    with pytest.raises(ValueError, match="rank 2 is ill"):
        World(3).run(program)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_world_needs_ranks(size):
    with pytest.raises(SpecError, match="at least one rank"):
        World(size)


@given(length=st.integers(0, 1000), parts=st.integers(1, 50))
def test_split_sizes_are_numpys(length, parts):
    assert split_sizes(length, parts) == [len(a) for a in np.array_split(np.arange(length), parts)]
