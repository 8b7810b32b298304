"""Seconds of a schedule for many costs at once: the planner's pass, quick when asked again, and for steps of many microbatches, which are extended exactly
from a shorter one (see `steady`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import SCHEDULES
from .actions import B, F, I, Schedule, W
from .graph import Nodes, Order, compile_nodes, order_nodes, sends, sweep
from .steady import steady

Floats = NDArray[np.float64]
EXTEND_ABOVE = 4_000  # actions; below, the whole step is as quick
MOST_AT_ONCE = 2**21  # numbers of a sweep


@dataclass(frozen=True)
class Batch:
    """Seconds of a chunk's parts [stages, batch], of a message between ranks [batch]; `blocking`: whoever sends waits for it."""

    forward: Floats
    backward: Floats
    weight: Floats
    message: Floats
    blocking: bool

    def take(self, which: NDArray[np.intp] | slice) -> Batch:
        return Batch(self.forward[:, which], self.backward[:, which], self.weight[:, which], self.message[which], self.blocking)


def makespans(
    name: str,
    stages: int,
    microbatches: int,
    virtual_stages: int | None,
    forward: ArrayLike,
    backward: ArrayLike,
    weight: ArrayLike = 0.0,
    p2p_seconds: ArrayLike = 0.0,
    blocking: bool = False,
) -> Floats:
    """Seconds of the step, [batch]. Costs of a chunk are a number, one a batch entry [batch], or one a stage and entry [stages * virtual_stages, batch];
    `p2p_seconds` a number or [batch]. Raises `SpecError` for what the schedule cannot do.
    """
    entry = SCHEDULES.get_or_raise(name, "schedule")
    v = entry.default_chunks if virtual_stages is None else virtual_stages
    entry.check(stages, microbatches, v)
    given = [np.asarray(c, dtype=float) for c in (forward, backward, weight)]
    message = np.asarray(p2p_seconds, dtype=float)
    count = max([c.shape[-1] if c.ndim else 1 for c in (*given, message)])
    f, b, w = (np.broadcast_to(c, (stages * v, count)) for c in given)
    batch = Batch(f, b, w, np.broadcast_to(message, count), blocking)
    found = np.full(count, np.nan)
    if 2 * stages * v * microbatches > EXTEND_ABOVE:
        _extend(entry, stages, microbatches, v, batch, found)
    left = np.flatnonzero(np.isnan(found))
    if len(left):
        nodes, order = compiled(entry.name, stages, microbatches, v)
        step = max(1, MOST_AT_ONCE // len(nodes))
        for some in np.split(left, range(step, len(left), step)):
            found[some] = _ends(nodes, order, batch.take(some)).max(axis=0)
    return found


@lru_cache(maxsize=256)
def compiled(name: str, stages: int, microbatches: int, virtual_stages: int) -> tuple[Nodes, Order]:
    """A schedule's dependency graph and the order to sweep it in; kept, because a planner asks again and again."""
    nodes = compile_nodes(SCHEDULES.get_or_raise(name, "schedule").table(stages, microbatches, virtual_stages))
    return nodes, order_nodes(nodes.first, nodes.needs, nodes.table, nodes.row)


def _ends(nodes: Nodes, order: Order, batch: Batch) -> Floats:
    """End of every node, [nodes, batch]."""
    costs = np.empty((4, *batch.forward.shape))
    costs[F], costs[I], costs[W], costs[B] = batch.forward, batch.backward, batch.weight, batch.backward + batch.weight
    rows = costs[nodes.table.kind, nodes.table.stage]
    pair = nodes.second >= 0
    length = rows[nodes.row]
    length[pair] += rows[nodes.second[pair]]
    if not batch.message.any():
        return sweep(order, length, None)
    if batch.blocking:
        return sweep(order, length + sends(nodes)[:, None] * batch.message, None)
    return sweep(order, length, nodes.remote[:, :, None] * batch.message)


def _extend(entry: Schedule, p: int, m: int, v: int, batch: Batch, found: Floats) -> None:
    """Fills in the steps that follow from a shorter one, under half as long, whose middle has settled."""
    least = 6 * p
    while entry.period is not None and 2 * least < m and np.isnan(found).any():
        g = entry.period(p)
        short = m - (m - least) // g * g
        least *= 2
        middle = steady(entry.name, p, short, v)
        if middle is None:
            continue
        left = np.flatnonzero(np.isnan(found))
        end = _ends(middle.nodes, middle.order, batch.take(left))
        found[left] = end.max(axis=0) + (m - short) // middle.microbatches * middle.advance(end)
