"""Ranks of a pipeline: which differ, what they hold of how many micro-batches.

A rank's peak is that of one micro-batch's replay beside the kept activations and outputs of the others in flight; buffers that receive
exist for every micro-batch of the step (torch.distributed.pipelining, `_prepare_forward_infra`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...schedules.replay import in_flight
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..ledger.ranks import V_SHAPED, places
from ..table import IntColumn, PlanTable
from .program import FEW, Pattern, pattern
from .setup import Stage


@dataclass(frozen=True)
class Rank:
    """A class of pipeline ranks for some rows of a table: what stands there, how often its unit repeats, and how many micro-batches it
    holds at most, in units of its whole share of one.
    """

    stage: Stage  # of one of the rows: the others differ in repeats only
    rows: NDArray[np.intp]
    number: IntColumn
    repeats: IntColumn
    held: NDArray[np.float64]
    fresh: bool = False  # before the rank's first backward pass: no gradients of earlier micro-batches

    def only(self, rows: NDArray[np.bool_]) -> Rank:
        """The same for some of its rows."""
        if rows.all():
            return self
        return replace(self, rows=self.rows[rows], number=self.number[rows], repeats=self.repeats[rows], held=self.held[rows])


FORWARDS_FIRST = ("gpipe", "looped-bfs")  # every forward pass before any backward pass: the most is in flight while there are no gradients


def ranks(model: ModelSpec, structure: Structure, table: PlanTable) -> list[Rank]:
    """The classes of ranks of all plans; classes of the same shape are one."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    found: dict[tuple[tuple[Stage, Pattern], int], list[tuple[NDArray[np.intp], int, int, NDArray[np.float64]]]] = {}
    stages: dict[tuple[tuple[Stage, Pattern], int], Stage] = {}
    key: IntColumn = table.pp << 20 | table.virtual_stages
    least = 2 if structure.schedule in (*V_SHAPED, "interleaved-zb1p") else 1
    for value in np.unique(key):
        rows = np.flatnonzero(key == value)
        pp, virtual = int(value >> 20), int(value & 0xFFFFF)
        seen: Counter[tuple[Stage, Pattern]] = Counter()
        for number, stage, shape, repeats in _stages(
            model, structure.framework, structure.schedule, structure.layers_per_stage, pp, virtual, every
        ):
            same = (shape, seen[shape])  # a plan is in each group once
            seen[shape] += 1
            held = np.ones(len(rows))
            if pp > 1:
                m = table.accumulation[rows]
                held = np.asarray(in_flight(structure.schedule, pp, max(virtual, least), m, np.full(len(rows), number)), dtype=np.float64)
            found.setdefault(same, []).append((rows, number, repeats, np.broadcast_to(held, (len(rows),))))
            stages[same] = stage
    joined = [_joined(stages[same], entries, len(table)) for same, entries in found.items()]
    if structure.schedule == "1f1b":
        return _one_by_one(joined, table)
    if structure.schedule not in FORWARDS_FIRST:
        return joined
    piped = [r for r in joined if r.stage.piped]
    later = [replace(r, held=np.maximum(r.held - 1, 1)) if r.stage.piped else r for r in joined]
    return later + [replace(r, fresh=True) for r in piped]


def _one_by_one(joined: list[Rank], table: PlanTable) -> list[Rank]:
    """1F1B: a rank that warms up with every micro-batch of the step holds one fewer once gradients exist."""
    found, fresh = [], []
    for rank in joined:
        if not rank.stage.piped:
            found.append(rank)
            continue
        m = table.accumulation[rank.rows]
        every = rank.held >= m
        found.append(replace(rank, held=np.where(every, np.maximum(m - 1, 1), rank.held)))
        if every.any():
            fresh.append(replace(rank.only(every), fresh=True))
    return found + fresh


def _joined(stage: Stage, entries: list[tuple[NDArray[np.intp], int, int, NDArray[np.float64]]], size: int) -> Rank:
    rows = np.concatenate([e[0] for e in entries])
    order = np.argsort(rows, kind="stable")  # the order of the table, as everything else that belongs to its rows
    number, repeats = (np.concatenate([np.full(len(e[0]), e[k], dtype=np.int64) for e in entries])[order] for k in (1, 2))
    return Rank(stage, rows[order], number, repeats, np.concatenate([e[3] for e in entries])[order])


@lru_cache(maxsize=4096)
def _stages(
    model: ModelSpec, framework: str, schedule: str, given: tuple[int, ...] | None, pp: int, virtual: int, every: int
) -> list[tuple[int, Stage, tuple[Stage, Pattern], int]]:
    """(rank, its stage, the stage with few repeats and its shape, repeats) of each class of ranks."""
    if pp == 1:
        stages = [(0, Stage(model.layers))]
    else:
        stages = []
        for place in places(model, Structure(framework=framework, schedule=schedule, layers_per_stage=given), pp, virtual):
            layers = tuple(name for name, count in place.layers for _ in range(count))
            stages.append((place.rank, Stage(layers, place.embedding, place.head, piped=True)))
    found = []
    for number, stage in stages:
        shape = pattern(stage.layers, every)
        few = replace(shape, repeats=min(shape.repeats, FEW + 1))
        found.append((number, stage, (replace(stage, layers=few.layers(few.repeats)), few), shape.repeats))
    return found
