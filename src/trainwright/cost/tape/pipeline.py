"""Ranks of a pipeline: which differ, what they hold of how many micro-batches.

A rank's peak is that of one micro-batch's replay beside the kept activations and outputs of the others in flight; buffers that receive exist for every
micro-batch of the step (torch.distributed.pipelining, `_prepare_forward_infra`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schedules.replay import in_flight
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..ledger.ranks import V_SHAPED, places
from ..table import IntColumn, PlanTable
from .setup import Stage


@dataclass(frozen=True)
class Rank:
    """A class of pipeline ranks and, for each plan, how many micro-batches it holds at most, in `per_unit` parts of one."""

    number: int
    stage: Stage
    held: NDArray[np.float64]


def ranks(model: ModelSpec, structure: Structure, table: PlanTable) -> list[Rank]:
    """The classes of ranks of plans that share pp and virtual_stages."""
    pp, virtual = int(table.pp[0]), int(table.virtual_stages[0])
    if pp == 1:
        return [Rank(0, Stage(model.layers), np.ones(len(table)))]
    least = 2 if structure.schedule in (*V_SHAPED, "interleaved-zb1p") else 1
    chunks = np.maximum(table.virtual_stages, least)
    found = []
    for place in places(model, structure, pp, virtual):
        layers = tuple(name for name, count in place.layers for _ in range(count))
        held = in_flight(structure.schedule, table.pp, chunks, table.accumulation, np.full(len(table), place.rank))
        found.append(Rank(place.rank, Stage(layers, place.embedding, place.head, piped=True), np.asarray(held, dtype=np.float64)))
    return found


def groups(table: PlanTable) -> list[NDArray[np.intp]]:
    """Rows that share pp and virtual_stages."""
    key: IntColumn = table.pp << 20 | table.virtual_stages
    return [np.flatnonzero(key == value) for value in np.unique(key)]
