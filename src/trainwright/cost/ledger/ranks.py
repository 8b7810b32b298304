"""Which pipeline rank is the worst: what stands on each, and how many micro-batches of it are in flight.

The ranks of a pipeline fall into a few classes: first, last, and one for each number of layers between. Inside a class the earliest rank has
the most in flight (V-shaped schedules with chunks alike: the last), so only it is counted. Peaks in flight come from `trainwright.schedules`:
closed forms, or a count of the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...frameworks import FRAMEWORKS
from ...schedules import SCHEDULES
from ...schedules.actions import Ends, PlacementKind
from ...schedules.replay import ends_in_flight as peak_of_ends
from ...schedules.replay import in_flight_of_layers
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..stages import layers_of_rank, layers_per_stage
from ..table import Column, IntColumn, PlanTable, different
from .scope import Scope


@dataclass(frozen=True)
class Place:
    """A class of pipeline ranks: `layers` counts its layers by block name, `copies` of the weights (DualPipe holds two stages)."""

    rank: int
    layers: tuple[tuple[str, int], ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Slot:
    """Classes of ranks, as columns."""

    rank: IntColumn
    layers: dict[str, Column]
    embedding: Column
    head: Column

    def take(self, rows: NDArray[np.intp]) -> Slot:
        return Slot(self.rank[rows], {k: c[rows] for k, c in self.layers.items()}, self.embedding[rows], self.head[rows])


def places(model: ModelSpec, structure: Structure, pp: int, virtual: int) -> list[Place]:
    """The classes of ranks of a pipeline of `pp` ranks with `virtual` chunks each."""
    even = FRAMEWORKS[structure.framework].even_stages
    return _places(model, SCHEDULES[structure.schedule].placement, structure.layers_per_stage, even, pp, virtual)


def stage_layers(model: ModelSpec, structure: Structure, stages: int) -> list[int]:
    """Layers of each stage, first to last."""
    return layers_per_stage(model.num_layers, stages, structure.layers_per_stage, FRAMEWORKS[structure.framework].even_stages)


@lru_cache(maxsize=4096)
def _places(model: ModelSpec, placement: PlacementKind, given: tuple[int, ...] | None, even: bool, pp: int, virtual: int) -> list[Place]:
    """`places` of all schedules of one placement."""
    v_shape = placement == "v"
    virtual = max(virtual, 2) if v_shape and pp > 1 else virtual
    counts = layers_per_stage(model.num_layers, pp * virtual, given, even)
    ranks = layers_of_rank(counts, pp, v_shape)
    last = 0 if v_shape and virtual % 2 == 0 else pp - 1
    found: dict[tuple[object, ...], tuple[Place, list[int]]] = {}
    for rank in reversed(range(pp)) if v_shape else range(pp):
        chunks = list(ranks[rank])
        ends = {rank}
        if placement == "bidirectional" and pp > 1:
            chunks += ranks[pp - 1 - rank]
            ends.add(pp - 1 - rank)
        layers = tuple(sorted(Counter(model.layers[i] for chunk in chunks for i in chunk).items()))
        place = Place(rank, layers, 0 in ends, last in ends)
        key, sizes = (layers, place.embedding, place.head), [len(chunk) for chunk in chunks]
        if v_shape and len({*sizes}) > 1:  # its larger chunk is more often in flight on earlier ranks
            found[key] = place, sizes
        found.setdefault(key, (place, sizes))
    return sorted(_undominated(list(found.values())), key=lambda place: place.rank)


def _undominated(found: list[tuple[Place, list[int]]]) -> list[Place]:
    """Without classes that one before them exceeds in every count, and in every chunk of theirs."""

    def exceeds(one: tuple[Place, list[int]], other: tuple[Place, list[int]]) -> bool:
        (a, large), (b, small) = one, other
        mine = dict(a.layers)
        chunks = all(n >= k for n, k in zip(large, small))
        return chunks and a.embedding >= b.embedding and a.head >= b.head and all(mine.get(k, 0) >= n for k, n in b.layers)

    return [b[0] for i, b in enumerate(found) if not any(exceeds(a, b) for a in found[:i])]


def classes(scope: Scope) -> tuple[NDArray[np.intp], NDArray[np.intp], Slot]:
    """(the plan that each class of ranks belongs to, the first class of each plan, the classes): plan after plan, and each plan's by rank."""
    pairs, inverse = np.unique(scope.table.pp << 32 | scope.table.virtual_stages, return_inverse=True)
    lists = [places(scope.model, scope.structure, int(k >> 32), int(k & 0xFFFFFFFF)) for k in pairs]
    sizes = np.array([len(x) for x in lists], dtype=np.intp)
    mine = sizes[inverse]
    first = np.cumsum(mine) - mine
    owner = np.repeat(np.arange(len(scope)), mine)
    which = np.arange(len(owner)) - first[owner] + (np.cumsum(sizes) - sizes)[inverse][owner]
    every = [place for found in lists for place in found]

    def column(values: list[float]) -> Column:
        return np.array(values, dtype=np.float64)[which]

    counts = [dict(p.layers) for p in every]
    return (
        owner,
        first,
        Slot(
            rank=np.array([p.rank for p in every], dtype=np.int64)[which],
            layers={name: column([float(c.get(name, 0)) for c in counts]) for name in scope.model.blocks},
            embedding=column([float(p.embedding) for p in every]),
            head=column([float(p.head) for p in every]),
        ),
    )


def slots(scope: Scope) -> list[Slot]:
    """The classes of ranks of one plan."""
    owner, _, found = classes(scope)
    return [found.take(np.array([k])) for k in range(len(owner))]


def in_flight(scope: Scope, rank: IntColumn) -> Column:
    """Micro-batches whose activations a rank holds at most, in units of its whole share of one (chunks of an interleaved schedule count
    1/v).
    """
    table = scope.table
    held = np.ones(len(scope))
    for schedule, rows, virtual in _piped(table):
        key = table.pp[rows] << 20 | virtual
        for value in different(key):
            some, pp, chunks = rows[key == value], int(value >> 20), int(value & 0xFFFFF)
            layers = tuple(stage_layers(scope.model, scope.structure, pp * chunks))
            held[some] = in_flight_of_layers(schedule, chunks, table.accumulation[some], rank[some], layers)
        if SCHEDULES[schedule].placement == "bidirectional":
            held[rows] /= 2  # counted in stages, and a rank's share is two of them
    return held


def ends_in_flight(scope: Scope) -> Ends:
    """Micro-batches that the model's ends have in flight at most."""
    table = scope.table
    held = np.ones((3, len(scope)))
    for schedule, rows, virtual in _piped(table):
        for k, most in enumerate(peak_of_ends(schedule, table.pp[rows], virtual, table.accumulation[rows])):
            held[k, rows] = most
    return Ends(*held)


def _piped(table: PlanTable) -> Iterator[tuple[str, NDArray[np.intp], IntColumn]]:
    """(schedule, plans, chunks a rank) of plans with several stages."""
    for structure, rows in table.by_structure():
        rows = rows[table.pp[rows] > 1]
        if len(rows):
            yield structure.schedule, rows, np.maximum(table.virtual_stages[rows], SCHEDULES[structure.schedule].default_chunks)
