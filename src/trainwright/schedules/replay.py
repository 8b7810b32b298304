"""Replays action lists with costs: `schedule` is the library's call, `replay` takes full costs, `in_flight` is the memory of the planner, whose quick pass
is `makespans`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..errors import SpecError
from . import SCHEDULES
from .actions import ActionTable, B, Ends, F, I, Placement, Schedule, W
from .collectives import with_collectives
from .costs import Cost, Costs, row_seconds, whole_share
from .graph import Nodes, Order, compile_nodes, order_nodes, sends, sweep
from .interleaved import grouped
from .timeline import CAUSES, Timeline, peaks


def schedule(
    name: str | Schedule | ActionTable,
    stages: int = 4,
    microbatches: int = 8,
    virtual_stages: int | None = None,
    forward: Cost = 1,
    backward: Cost = 2,
    weight: Cost = 0,
    p2p: float = 0,
    **more: object,
) -> Timeline:
    """A schedule replayed. `stages` is the number of pipeline ranks, `virtual_stages` the chunks on each (None: the
    schedule's own least).

    `forward`, `backward` (input gradient) and `weight` (weight gradient) are one rank's whole share of one microbatch: a number, one a rank, one a
    chunk [stages * virtual_stages], or one a chunk and microbatch; `p2p` is a one-way latency. `more` are further fields of `Costs` (recompute,
    overlap, blocking, reduce, gather, slowdown, ...), recompute, reduce and gather in whole shares too; `group` is interleaved-1f1b's number of
    microbatches that run a chunk before the next (default: stages). Raises `SpecError` for what the schedule cannot do, with the rule, and for costs
    that make no sense.
    """
    if isinstance(name, ActionTable):
        table, copies = name, 2 if name.placement.streams == 2 else 1
    else:
        entry = name if isinstance(name, Schedule) else SCHEDULES.get_or_raise(name, "schedule")
        if (group := more.pop("group", None)) is not None:
            entry = _grouped(entry, group)
        table, copies = entry.table(stages, microbatches, virtual_stages), entry.weight_copies
    unknown = sorted(set(more) - set(Costs.__dataclass_fields__))
    if unknown:
        raise SpecError(f"unknown cost {unknown[0]!r}", "schedule", sorted(Costs.__dataclass_fields__))
    place = table.placement
    shares = {"forward": forward, "backward": backward, "weight": weight}
    shares |= {k: more.pop(k) for k in ("recompute", "reduce", "gather") if k in more}  # type: ignore[misc]
    chunks = {k: whole_share(v, place, k) for k, v in shares.items()}
    return replay(table, Costs(**chunks, latency=p2p, **more), copies)  # type: ignore[arg-type]


def _grouped(entry: Schedule, group: object) -> Schedule:
    if entry.name != "interleaved-1f1b":
        raise SpecError(f"{entry.name} has no groups of microbatches", "group", "the schedule interleaved-1f1b")
    if isinstance(group, bool) or not isinstance(group, (int, np.integer)) or group < 1:
        raise SpecError(f"{str(group)[:40]!r} is not a whole number of at least 1", "group", "the number of stages")
    return grouped(int(group))


def replay(table: ActionTable, costs: Costs, weight_copies: int = 1) -> Timeline:
    """Runs every rank's list as early as its order and the messages allow. Costs are those of chunks (see `Costs`).
    Raises `SpecError` for lists that cannot run.
    """
    return run(compile_nodes(table), costs.checked(table.placement), weight_copies)


def run(nodes: Nodes, costs: Costs, weight_copies: int = 1, order: Order | None = None) -> Timeline:
    """`replay` for a compiled table and checked costs."""
    busy = node_seconds(nodes, costs)
    message, delays, length = costs.message_seconds, None, busy
    if message and costs.blocking:
        length = busy + message * sends(nodes)
    elif message:
        delays = nodes.remote * message
    if np.any(costs.gather) or np.any(costs.reduce):
        start, end, collectives = with_collectives(nodes, costs, length, delays)
    else:
        order = order or order_nodes(nodes.first, nodes.needs, nodes.table, nodes.row)
        end = sweep(order, length, delays)
        start, collectives = end - length, ()
    return Timeline(nodes, costs, start, end, busy, delays, collectives, weight_copies)


def node_seconds(nodes: Nodes, costs: Costs) -> np.ndarray:
    """Seconds of every node."""
    seconds = row_seconds(nodes.table, costs)
    if len(nodes) == len(seconds):
        return seconds
    pair = nodes.second >= 0
    one, other = seconds[nodes.row], np.where(pair, seconds[nodes.second], 0.0)
    # a pair is never quicker than its longer half
    return np.where(pair, np.maximum((one + other) * costs.overlap, np.maximum(one, other)), one)


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """See `Timeline.idle_by_cause`: replays without what is blamed, one thing at a time."""
    nodes, costs, ranks = timeline.nodes, timeline.costs, timeline.stages
    order = order_nodes(nodes.first, nodes.needs, nodes.table, nodes.row)
    group = nodes.table.kind[nodes.row] + np.where(nodes.second >= 0, 8, 0)
    mean = np.bincount(group, weights=timeline.busy) / np.maximum(np.bincount(group), 1)
    level = mean[group]
    message = sends(nodes) * costs.message_seconds if costs.blocking else 0.0
    bare = sweep(order, level, None)
    late = sweep(order, level + message, timeline.delays)
    real = sweep(order, timeline.busy + message, timeline.delays)
    out = dict.fromkeys(CAUSES, 0.0)
    first, last = nodes.first[:-1], nodes.first[1:] - 1
    out["ramp"] = float((bare[first] - level[first]).sum())
    out["flush"] = float((bare.max() - bare[last]).sum())
    out["dependency"] = ranks * float(bare.max()) - float(level.sum()) - out["ramp"] - out["flush"]
    out["latency"] = ranks * float(late.max() - bare.max())
    out["imbalance"] = ranks * float(real.max() - late.max())
    out["collective"] = ranks * (timeline.makespan - float(real.max()))
    return out


Result = Timeline


@lru_cache(maxsize=4096)
def _peaks(name: str, stages: int, microbatches: int, virtual_stages: int) -> np.ndarray:
    table = SCHEDULES.get_or_raise(name, "schedule").table(stages, microbatches, virtual_stages)
    return peaks(table, np.full(table.placement.stages, 1.0 / virtual_stages))


def in_flight(name: str, stages: object, virtual_stages: object, microbatches: object, rank: object = None) -> np.ndarray:
    """Peak activations on `rank` (None: the most over the ranks), in units of one rank's whole activations of one
    microbatch, over arrays that broadcast.

    A closed form where the schedule has one, else counted once for each different (stages, virtual stages,
    microbatches).
    """
    entry = SCHEDULES.get_or_raise(name, "schedule")
    p, v, m = (np.asarray(x, dtype=np.int64) for x in (stages, virtual_stages, microbatches))
    if entry.in_flight is not None:
        if rank is None:  # the most is at one end of the pipeline
            return np.maximum(entry.in_flight(p, m, v, np.zeros_like(p)), entry.in_flight(p, m, v, p - 1)).astype(float)
        return np.asarray(entry.in_flight(p, m, v, np.asarray(rank)), dtype=float)
    p, v, m, r = np.broadcast_arrays(p, v, m, -1 if rank is None else np.asarray(rank))
    m = np.minimum(m, entry.reach * p + 1)  # beyond, more microbatches only lengthen the steady state
    keys, where = np.unique(np.stack([p.ravel(), m.ravel(), v.ravel(), r.ravel()], axis=1), axis=0, return_inverse=True)
    values = [_peaks(entry.name, *map(int, k[:3])) for k in keys]
    found = np.array([h.max() if k[3] < 0 else h[k[3]] for h, k in zip(values, keys)])
    return found[where.ravel()].reshape(p.shape)


def in_flight_of_layers(name: str, virtual_stages: int, microbatches: object, rank: object, layers: tuple[int, ...]) -> np.ndarray:
    """`in_flight` of ranks of one pipeline whose stages, first to last, have so many `layers`: where the chunks of a rank differ, what its list holds of the
    larger ones; never less than with even chunks, which lower bounds count on.
    """
    entry = SCHEDULES.get_or_raise(name, "schedule")
    stages = len(layers) // virtual_stages
    m, r = np.broadcast_arrays(np.asarray(microbatches, dtype=np.int64), np.asarray(rank, dtype=np.int64))
    held = in_flight(name, stages, virtual_stages, m, r)
    if entry.placement == "bidirectional" or virtual_stages == 1:
        return held
    place = Placement(entry.placement, stages, virtual_stages, 1).rank_of_stage[0]
    count, size = np.bincount(place, layers, stages), np.bincount(place, np.square(layers), stages)
    enough = np.where(m % stages, m, np.minimum(m, entry.reach * stages))  # beyond, whole rounds only lengthen the steady state
    for k in np.flatnonzero((size * virtual_stages != count**2)[r] & (held < m)):
        held[k] = max(held[k], _uneven(entry.name, stages, int(enough[k]), virtual_stages, layers)[r[k]] / count[r[k]])
    return held


@lru_cache(maxsize=4096)
def _uneven(name: str, stages: int, microbatches: int, virtual_stages: int, layers: tuple[int, ...]) -> np.ndarray:
    """Layers times micro-batches that each rank holds at most."""
    table = SCHEDULES[name].table(stages, microbatches, virtual_stages)
    return peaks(table, np.array(layers, dtype=float))


@lru_cache(maxsize=4096)
def _ends(name: str, stages: int, microbatches: int, virtual_stages: int) -> tuple[int, int, int]:
    return ends_of(SCHEDULES.get_or_raise(name, "schedule").table(stages, microbatches, virtual_stages))


def ends_of(table: ActionTable) -> tuple[int, int, int]:
    """`Ends` counted on a table's lists."""

    def most(stage: int, until: tuple[int, int]) -> int:
        mine = (table.stage == stage) & (table.rank == table.placement.rank_of_stage[0, stage])
        kind = table.kind[mine]
        return int(np.cumsum(np.where(kind == F, 1, 0) - np.isin(kind, until)).max())

    last = table.placement.stages - 1
    return most(0, (W, B)), most(last, (W, B)), most(last, (I, B))


def ends_in_flight(name: str, stages: object, virtual_stages: object, microbatches: object) -> Ends:
    """`Ends` over arrays that broadcast, to what broadcasts to their shape: a closed form where the schedule has one, else counted as `in_flight` is."""
    entry = SCHEDULES.get_or_raise(name, "schedule")
    if entry.ends is not None:
        return Ends(*entry.ends(stages, microbatches, virtual_stages))
    p, v, m = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (stages, virtual_stages, microbatches)))
    m = np.minimum(m, 2 * entry.reach * p + 1)  # a little more than enough for the peak may still end otherwise
    keys, where = np.unique(np.stack([p.ravel(), m.ravel(), v.ravel()], axis=1), axis=0, return_inverse=True)
    found = np.array([_ends(entry.name, *map(int, k)) for k in keys], dtype=float)
    return Ends(*(found[where.ravel(), k].reshape(p.shape) for k in range(3)))


__all__ = ["Result", "Timeline", "ends_in_flight", "in_flight", "in_flight_of_layers", "replay", "run", "schedule"]
