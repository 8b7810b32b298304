"""Long steps from short ones, exactly. Most schedules repeat themselves in the middle; once the replay does too, every further period adds the same
time.

The argument. Cut every rank's list so that nothing before the cut waits for anything after it. What comes after depends on the past only through the
*state*: the end of each rank's last action before the cut, and of each action before it that something after it waits for. A replay takes maxima and
adds, so adding a constant to the whole state adds it to everything later. If the state one period on is the state plus a constant, and the list
repeats itself, then so it is at every later period, and the drain comes as much later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import SCHEDULES
from .actions import ActionTable
from .graph import Nodes, Order, compile_nodes, order_nodes

TOLERANCE = 1e-10  # of a period's length; rounding of the sums is some 1e-16 an action


@dataclass(frozen=True)
class Steady:
    """A short step and its repeating middle: nodes of the `state` at one cut and at the next, the nodes `between`, and how many microbatches lie between."""

    nodes: Nodes
    order: Order
    before: np.ndarray
    after: np.ndarray
    between: np.ndarray
    microbatches: int

    def advance(self, end: np.ndarray) -> np.ndarray:
        """Time that a further period adds, NaN where the replay has not settled yet. `end` [nodes] or [nodes, batch]."""
        steps = end[self.after] - end[self.before]
        low, high = steps.min(axis=0), steps.max(axis=0)
        return np.where(high - low <= TOLERANCE * np.maximum(high, 1e-300), high, np.nan)


@lru_cache(maxsize=256)
def steady(name: str, p: int, m: int, v: int) -> Steady | None:
    """The repeating middle of the schedule at this size; None where it is too short or does not repeat."""
    entry = SCHEDULES.get_or_raise(name, "schedule")
    if entry.period is None or m < 2 * entry.period(p):
        return None
    g = entry.period(p)
    nodes = compile_nodes(entry.table(p, m, v))
    longer = compile_nodes(entry.table(p, m + g, v))
    streams = nodes.table.placement.streams
    step, target = g // streams, (m - 2 * p - 2 * g) // streams
    if target < step or len(longer) == len(nodes):
        return None
    a, b = closure(nodes, target - step), closure(nodes, target)
    length = (np.diff(longer.first) - np.diff(nodes.first)).tolist()
    if (b - a).tolist() != length or not _repeats(nodes, longer, b, np.array(length), g):
        return None
    before, after = state(nodes, a), state(nodes, b)
    if (
        len(before) != len(after)
        or (nodes.rank[before] != nodes.rank[after]).any()
        or (after - before != np.array(length)[nodes.rank[before]]).any()
    ):
        return None
    order = order_nodes(nodes.first, nodes.needs, nodes.table, nodes.row)
    between = np.concatenate([np.arange(nodes.first[r] + a[r], nodes.first[r] + b[r]) for r in range(p)])
    return Steady(nodes, order, before, after, between, g)


def closure(nodes: Nodes, microbatch: int) -> np.ndarray:
    """How many nodes of each rank lie before the cut: all that stage 0's backward of the given microbatch (of the first stream) waits for, and itself."""
    table, first = nodes.table, nodes.first
    rows = np.flatnonzero((table.stage == 0) & (table.microbatch == microbatch) & (table.kind != 0))
    upto = np.zeros(len(first) - 1, np.int64)
    wanted = upto.copy()
    last = int(nodes.row_node[rows].max())
    wanted[nodes.rank[last]] = last - first[nodes.rank[last]] + 1
    rank_of = np.append(nodes.rank, 0)
    while (todo := np.flatnonzero(wanted > upto)).size:
        for r in todo.tolist():
            part = slice(first[r] + upto[r], first[r] + wanted[r])
            upto[r] = wanted[r]
            need = nodes.needs[part].ravel()
            need = need[need < len(nodes)]
            np.maximum.at(wanted, rank_of[need], need - first[rank_of[need]] + 1)
    return upto


def state(nodes: Nodes, cut: np.ndarray) -> np.ndarray:
    """Nodes before the cut whose end matters after it."""
    inside = np.zeros(len(nodes) + 1, bool)
    for r, count in enumerate(cut.tolist()):
        inside[nodes.first[r] : nodes.first[r] + count] = True
    late = np.flatnonzero(~inside[:-1])
    waited = nodes.needs[late].ravel()
    last = nodes.first[:-1] + cut - 1
    found = np.zeros(len(nodes) + 1, bool)
    found[last[cut > 0]] = found[waited[inside[waited]]] = True
    return np.flatnonzero(found)


def _repeats(nodes: Nodes, longer: Nodes, cut: np.ndarray, length: np.ndarray, g: int) -> bool:
    """Whether the longer step is the shorter with the period before the cut once more at the cut."""
    short, long = _plain(nodes.table), _plain(longer.table)
    step = g // nodes.table.placement.streams
    for r, (k, t) in enumerate(zip(cut.tolist(), length.tolist())):
        x0, xa, xb, x1 = (_row(nodes, r, at) for at in (0, k - t, k, None))
        y0, yb, yc, y1 = (_row(longer, r, at) for at in (0, k, k + t, None))
        shift = np.array([0, 0, step, 0, 0])
        same = np.array_equal(long[y0:yb], short[x0:xb]) and np.array_equal(long[yb:yc], short[xa:xb] + shift)
        if not same or not np.array_equal(long[yc:y1], short[xb:x1] + shift):
            return False
    return True


def _row(nodes: Nodes, rank: int, at: int | None) -> int:
    """First row of a rank's node; of None or of the node behind its last, the row behind its last row."""
    low, high = int(nodes.first[rank]), int(nodes.first[rank + 1])
    return int(nodes.table.first[rank + 1]) if at is None or low + at >= high else int(nodes.row[low + at])


def _plain(table: ActionTable) -> np.ndarray:
    """Rows with the microbatch counted within its stream."""
    stream = table.placement.stream_of(table.microbatch)
    own = table.microbatch - stream * (table.placement.microbatches // table.placement.streams)
    return np.stack([table.kind, table.stage, own, table.fused, stream], axis=1)
