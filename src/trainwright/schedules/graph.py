"""From action lists to a dependency graph in the order in which it can run; finds what is missing, doubled, out of
place or waits for itself.

A *lane* is a queue that runs one node after another: a rank's compute, or a rank's collectives. A node starts when
the node before it on its lane has ended and all of its dependencies have ended (plus a delay each). Nodes are stored
level by level, a level being nodes that wait for nothing in the same level, so that a sweep is one array operation a
level.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ..errors import SpecError
from .actions import KINDS, ActionTable, B, F, I, W

NARROW_LANES = 16  # below this many numbers a level a plain loop beats one array operation (benchmarks/bench_replay.py measures both)
Ints: TypeAlias = np.ndarray


@dataclass(frozen=True)
class Nodes:
    """The work of every rank as nodes. An FB action is one node with two rows.

    `first` [lanes + 1], `row` [n] the first row of each node, `second` [n] the row of an FB's backward or -1, `needs`
    [n, d] the nodes waited for (n where there is none), `remote` [n, d] whether that producer is on another rank,
    `row_node` [rows] the node of each row.
    """

    table: ActionTable
    first: Ints
    row: Ints
    second: Ints
    needs: Ints
    remote: Ints
    row_node: Ints

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def rank(self) -> Ints:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def positions(table: ActionTable) -> tuple[Ints, Ints, Ints]:
    """Rows of every forward, input gradient and weight gradient, int [stages, microbatches] each. Raises `SpecError`
    unless each exists exactly once, where it belongs, in order.
    """
    stages, m = table.placement.stages, table.placement.microbatches
    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    bad = np.flatnonzero((stage < 0) | (stage >= stages) | (microbatch < 0) | (microbatch >= m))
    if len(bad):
        raise SpecError(
            f"{_text(table, bad[0])} does not exist: there are {stages} stages and {m} microbatches, counted from 0",
            _place(table, bad[0]),
        )
    wrong = np.flatnonzero(table.placement.rank_of(stage, microbatch) != table.rank)
    if len(wrong):
        owner = int(table.placement.rank_of(int(stage[wrong[0]]), int(microbatch[wrong[0]])))
        raise SpecError(
            f"{_text(table, wrong[0])} is in the list of rank {table.rank[wrong[0]]}, but its stage is on rank {owner}",
            _place(table, wrong[0]),
            f"rank {owner}",
        )
    key = stage * m + microbatch
    found = []
    for what, members in (
        ("forward (F)", (F,)),
        ("input gradient (I or B)", (I, B)),
        ("weight gradient (W or B)", (W, B)),
    ):
        rows = np.flatnonzero((kind == members[0]) | (kind == members[-1]))
        count = np.bincount(key[rows], minlength=stages * m)
        if len(doubled := np.flatnonzero(count > 1)):
            again = rows[key[rows] == doubled[0]][1]
            raise SpecError(f"{_text(table, again)} is there {count[doubled[0]]} times as {what}", _place(table, again), "once")
        if len(missing := np.flatnonzero(count == 0)):
            s, mb = divmod(int(missing[0]), m)
            owner = int(table.placement.rank_of(s, mb))
            raise SpecError(f"the {what} of stage {s}, microbatch {mb} is missing", f"rank {owner}", f"{s}{KINDS[members[0]]}{mb}")
        at = np.empty(stages * m, np.int64)
        at[key[rows]] = rows
        found.append(at.reshape(stages, m))
    forward, gradient, weight = found
    for early, late in ((forward, gradient), (gradient, weight)):
        if len(swapped := np.argwhere(early > late)):
            s, mb = swapped[0]
            raise SpecError(f"{_text(table, late[s, mb])} comes before {_text(table, early[s, mb])}", _place(table, late[s, mb]))
    return forward, gradient, weight


def compile_nodes(table: ActionTable) -> Nodes:
    """The dependency graph of a table. Raises `SpecError` as `positions` does."""
    forward, gradient, _ = positions(table)
    rows = len(table)
    producer = np.full(rows, -1)
    producer[forward[1:]] = forward[:-1]
    producer[gradient[:-1]] = gradient[1:]
    producer[gradient[-1]] = forward[-1]
    is_second = np.zeros(rows, bool)
    is_second[1:] = table.fused[:-1].astype(bool)
    row = np.flatnonzero(~is_second)
    row_node = np.cumsum(~is_second) - 1
    n = len(row)
    second = np.full(n, -1)
    second[row_node[is_second]] = np.flatnonzero(is_second)
    first = np.searchsorted(row, table.first)
    columns = [producer[row]]
    if is_second.any():
        columns.append(np.where(second >= 0, producer[second], -1))
    needs = np.stack([np.where(c >= 0, row_node[c], n) for c in columns], axis=1)
    node_rank = np.append(table.rank[row], -1)
    remote = (needs < n) & (node_rank[needs] != node_rank[:-1, None])
    same = (needs == np.arange(n)[:, None]).any(axis=1)
    if same.any():
        at = row[np.flatnonzero(same)[0]]
        raise SpecError(f"the overlapped pair at {_text(table, at)} waits for its own forward", _place(table, at))
    return Nodes(table, first, row, second, needs, remote, row_node)


def sends(nodes: Nodes) -> np.ndarray:
    """Messages that each node sends to other ranks, int [nodes]."""
    return np.bincount(nodes.needs[nodes.remote], minlength=len(nodes) + 1)[: len(nodes)]


@dataclass(frozen=True)
class Order:
    """Nodes level by level. `sequence` [n] node at each place, `place` [n + 1] its inverse (the last: a place that
    always reads 0), `bounds` [levels + 1], `previous` [n] and `needs` [n, d] as places.
    """

    sequence: Ints
    place: Ints
    bounds: tuple[int, ...]
    previous: Ints
    needs: Ints
    lanes: int

    @cached_property
    def python(self) -> tuple[list[int], list[list[int]]]:
        return self.previous.tolist(), [c.tolist() for c in self.needs.T]


def order_nodes(first: Ints, needs: Ints, table: ActionTable | None = None, row: Ints | None = None) -> Order:
    """Levels of a graph. Raises `SpecError` where nodes wait for each other, naming the rank and the action (when
    `table` and `row` are given).
    """
    lanes, n = len(first) - 1, len(needs)
    level = _levels_wide(first, needs) if lanes >= NARROW_LANES else _levels_narrow(first, needs)
    if n and (stuck := np.flatnonzero(level[:n] < 0)).size:
        raise _deadlock(first, needs, level, stuck, table, row)
    small = level[:n].astype(np.uint16) if level.max(initial=0) < 1 << 16 else level[:n]  # sixteen bits are sorted by radix
    sequence = np.argsort(small, kind="stable")
    place = np.empty(n + 1, np.int64)
    place[sequence] = np.arange(n)
    place[n] = n
    bounds = np.concatenate([[0], np.cumsum(np.bincount(level[:n]))]) if n else np.zeros(1, np.int64)
    previous = np.arange(-1, n - 1)
    previous[first[:-1][np.diff(first) > 0]] = n
    return Order(
        sequence, place, tuple(bounds[np.diff(bounds, prepend=-1) > 0].tolist()), place[previous[sequence]], place[needs[sequence]], lanes
    )


def _levels_wide(first: Ints, needs: Ints) -> Ints:
    """All lanes advance together, one node each where it can run: one round is one level."""
    n = len(needs)
    level = np.full(n + 2, -1)
    level[n] = 0
    needs = np.concatenate([needs, np.full((1, needs.shape[1]), n + 1)])  # node n: a lane's end, which never runs
    at, end = first[:-1].copy(), first[1:]
    at[at >= end] = n
    columns = [np.ascontiguousarray(c) for c in needs.T]
    done = level >= 0
    for step in range(n + 1):
        ready = done[columns[0][at]]
        for column in columns[1:]:
            ready &= done[column[at]]
        run = at[ready]
        if not len(run):
            break
        level[run] = step
        done[run] = True
        at = at + ready
        at[at == end] = n
    return level


def _levels_narrow(first: Ints, needs: Ints) -> Ints:
    """Each lane runs until it must wait; the node it waits for wakes it."""
    n = len(needs)
    level = [-1] * n + [0]
    wants = needs.tolist()
    at, end = first[:-1].tolist(), first[1:].tolist()
    asleep: dict[int, list[int]] = defaultdict(list)
    awake = list(range(len(at)))[::-1]
    while awake:
        lane = awake.pop()
        node, last = at[lane], end[lane]
        depth = level[node - 1] + 1 if node > first[lane] else 0
        while node < last:
            for other in wants[node]:
                if level[other] < 0:
                    asleep[other].append(lane)
                    break
                if other != n and level[other] >= depth:
                    depth = level[other] + 1
            else:
                level[node] = depth
                if node in asleep:
                    awake += asleep.pop(node)
                node += 1
                depth += 1
                continue
            break
        at[lane] = node
    return np.array(level)


def _deadlock(first: Ints, needs: Ints, level: Ints, stuck: Ints, table: ActionTable | None, row: Ints | None) -> SpecError:
    """Follows who waits for whom until a node repeats: the ring of waits is the reason."""
    lane_of = np.searchsorted(first, np.arange(len(needs)), side="right") - 1
    ring: list[int] = []
    node = int(stuck[0])
    while node not in ring:
        ring.append(node)
        waits = [int(x) for x in needs[node] if level[x] < 0]
        node = waits[0] if waits else node - 1
    ring = ring[ring.index(node) :]
    if table is None or row is None:
        return SpecError("the action lists wait for each other: a deadlock", f"lane {lane_of[ring[0]]}")
    names = [f"rank {lane_of[x]} at {_text(table, row[x])}" for x in ring if x < len(row)][:6]
    return SpecError("deadlock: " + " waits for ".join([*names, names[0].split(" at ")[0]]), _place(table, row[ring[0]]))


def _text(table: ActionTable, row: int) -> str:
    return f"{table.stage[row]}{KINDS[table.kind[row]]}{table.microbatch[row]}"


def _place(table: ActionTable, row: int) -> str:
    rank = int(table.rank[row])
    return f"rank {rank}, action {int(row - table.first[rank])}"


def sweep(order: Order, duration: np.ndarray, delays: np.ndarray | None) -> np.ndarray:
    """End time of every node, float [n] or [n, batch] in the order of the nodes.

    `duration` [n] or [n, batch]; `delays` [n, d] or [n, d, batch] is added to each dependency's end (None: nothing). A node starts at
    the latest of what it waits for, never before 0.
    """
    n = len(order.sequence)
    placed = np.ascontiguousarray(np.asarray(duration, float)[order.sequence])
    columns = None
    if delays is not None:
        late = np.asarray(delays, float)[order.sequence]
        columns = [np.ascontiguousarray(late[:, k]) for k in range(late.shape[1])]
    if order.lanes * (placed.size // max(n, 1)) >= NARROW_LANES:
        ends = _sweep_levels(order, placed, columns)
    elif placed.ndim == 1:
        ends = _sweep_python(order, placed.tolist(), columns)
    else:
        alone = (None if columns is None else [c[:, j] if c.ndim > 1 else c for c in columns] for j in range(placed.shape[1]))
        ends = np.stack([_sweep_python(order, placed[:, j].tolist(), late) for j, late in enumerate(alone)], axis=1)
    return ends[order.place[:n]]


def _sweep_python(order: Order, duration: list[float], delays: list[np.ndarray] | None) -> np.ndarray:
    previous, needs = order.python
    ends = [0.0] * (len(duration) + 1)
    if len(needs) == 1 and delays is None:
        for i, (before, need, length) in enumerate(zip(previous, needs[0], duration)):
            a, b = ends[before], ends[need]
            ends[i] = (a if a > b else b) + length
    elif len(needs) == 1 and delays is not None:
        for i, (before, need, length, late) in enumerate(zip(previous, needs[0], duration, delays[0].tolist())):
            a, b = ends[before], ends[need] + late
            ends[i] = (a if a > b else b) + length
    else:
        late_columns = [[0.0] * len(duration)] * len(needs) if delays is None else [c.tolist() for c in delays]
        for i, (before, length) in enumerate(zip(previous, duration)):
            start = ends[before]
            for column, lates in zip(needs, late_columns):
                arrival = ends[column[i]] + lates[i]
                if arrival > start:
                    start = arrival
            ends[i] = start + length
    return np.array(ends)


def _sweep_levels(order: Order, duration: np.ndarray, delays: list[np.ndarray] | None) -> np.ndarray:
    ends = np.zeros((len(duration) + 1, *duration.shape[1:]))
    needs = [np.ascontiguousarray(c) for c in order.needs.T]
    extra = None if delays is None else [d.reshape(*d.shape, *[1] * (duration.ndim - d.ndim)) for d in delays]
    for low, high in zip(order.bounds, order.bounds[1:]):
        start = ends[order.previous[low:high]]
        for k, column in enumerate(needs):
            arrival = ends[column[low:high]]
            if extra is not None:
                arrival += extra[k][low:high]
            np.maximum(start, arrival, out=start)
        np.add(start, duration[low:high], out=ends[low:high])
    return ends
