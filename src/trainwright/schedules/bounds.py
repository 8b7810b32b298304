"""How short a step could be at best, whatever the order: a lower bound that needs no search, and how far a schedule is above it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .actions import Placement
from .costs import Costs
from .timeline import Timeline


@dataclass(frozen=True)
class Bound:
    """`makespan` and `span` that no order can beat; `rank` is the one whose own work sets it (-1: the way of one microbatch does)."""

    makespan: float
    span: float
    rank: int
    reason: str


def lower_bound(place: Placement, costs: Costs, split: bool) -> Bound:
    """The largest, over ranks, of: the quickest way of any microbatch to the rank, all of the rank's work, and the quickest way back from its last
    backward (none where a split backward may leave weight gradients for last); or the whole way of the slowest microbatch.

    With one chunk and unsplit backward this is (m + p - 1)(F + B), which 1F1B attains; split, it is (p - 1)F + m(F + B) on the last rank, which ZB-H2
    attains at F = I = W.
    """
    c = costs.checked(place)
    ranks = place.rank_of_stage[place.stream_of(np.arange(place.microbatches))].T  # [stages, microbatches]
    slow = np.asarray(c.slowdown)[ranks]
    forward, gradient, weight = (np.asarray(x) * slow for x in (c.forward, np.asarray(c.backward) + np.asarray(c.recompute), c.weight))
    backward = gradient if split else gradient + weight
    hop = np.zeros_like(forward)
    hop[1:] = (ranks[1:] != ranks[:-1]) * c.message_seconds  # from stage s - 1 to s
    reach = np.cumsum(forward + hop, axis=0) - forward  # start of a stage's forward at the earliest
    back = np.cumsum(backward + hop, axis=0) - backward  # from the end of a stage's backward to the end of stage 0's
    way = (forward + backward + 2 * hop).sum(axis=0) + (weight[0] if split else 0.0)
    best = Bound(float(way.max()), 0.0, -1, "the way of one microbatch through every stage and back")
    for rank in range(place.ranks):
        mine = ranks == rank
        f, b = float(forward[mine].sum()), float((gradient + weight)[mine].sum())
        work = max((f + b) * min(c.overlap, 1.0), f, b)
        makespan = float(reach[mine].min()) + work + (0.0 if split else float(back[mine].min()))
        span = max(best.span, work)
        if makespan > best.makespan:
            best = Bound(makespan, span, rank, f"the work of rank {rank} and the quickest way to it" + ("" if split else " and back"))
        else:
            best = Bound(best.makespan, span, best.rank, best.reason)
    return best


def bound_of(timeline: Timeline) -> Bound:
    """The lower bound for the placement and costs of a replayed schedule; with unsplit backwards where its list has none split."""
    split = bool((timeline.table.kind == 2).any())
    return lower_bound(timeline.table.placement, timeline.costs, split)


def gap(timeline: Timeline) -> float:
    """makespan / lower bound - 1: 0 is provably optimal for its placement."""
    return timeline.makespan / bound_of(timeline).makespan - 1.0
