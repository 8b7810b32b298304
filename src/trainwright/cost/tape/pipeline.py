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

from ...schedules import SCHEDULES
from ...schedules.actions import Ends
from ...schedules.replay import ends_in_flight, in_flight_of_layers
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..ledger.ranks import places, stage_layers
from ..table import IntColumn, PlanTable, different
from .machine import ENDS
from .program import FEW, Pattern, pattern
from .setup import Stage


@dataclass(frozen=True)
class Rank:
    """A class of pipeline ranks for some rows of a table: what stands there, how often its unit repeats, and how many micro-batches it
    holds at most of each of `PIECES`, [pieces, rows], layers in units of all of them; `last`, when it reduces the gradients of a stage after
    that stage's last micro-batch.
    """

    stage: Stage  # of one of the rows: the others differ in repeats only
    rows: NDArray[np.intp]
    number: IntColumn
    repeats: IntColumn
    held: NDArray[np.float64]
    last: NDArray[np.float64]
    fresh: bool = False  # before the rank's first backward pass: no gradients of earlier micro-batches

    def only(self, rows: NDArray[np.bool_]) -> Rank:
        """The same for some of its rows."""
        if rows.all():
            return self
        return replace(self, **{name: getattr(self, name)[..., rows] for name in ("rows", "number", "repeats", "held", "last")})

    @property
    def apart(self) -> tuple[str, ...]:
        """Those of `ENDS` that stand here and are in flight otherwise than the layers."""
        here = np.array([self.stage.first, self.stage.last, self.stage.last])
        other = np.any([(held[1:] != held[0]).any(axis=1) for held in (self.held, self.last)], axis=0) & here
        other[1:] = other[1:].any()
        return tuple(name for name, apart in zip(ENDS, other) if apart)


PIECES = ("layers", *ENDS)  # the embedding's and the head's chunk of a rank with several have micro-batches of their own in flight
FORWARDS_FIRST = ("gpipe", "looped-bfs")  # every forward pass before any backward pass: the most is in flight while there are no gradients
ONE_STAGE = ("gpipe", "1f1b")  # a rank's only stage is done when it reduces: of several, other ones may be under way
Entry = tuple[NDArray[np.intp], int, int, NDArray[np.float64], NDArray[np.float64]]  # rows, rank, repeats, held, last


def ranks(model: ModelSpec, structure: Structure, table: PlanTable) -> list[Rank]:
    """The classes of ranks of all plans, whose structures differ in their schedules alone; classes of the same shape are one, those without gradients of
    earlier micro-batches last."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    found: dict[tuple[Stage, Pattern, int, bool], list[Entry]] = {}
    stages: dict[tuple[Stage, Pattern, int, bool], Stage] = {}
    for plans, rows in table.by_structure():
        key: IntColumn = table.pp[rows] << 20 | table.virtual_stages[rows]
        for value in different(key):
            some, pp, virtual = rows[key == value], int(value >> 20), int(value & 0xFFFFF)
            m = table.accumulation[some]
            chunks = max(virtual, SCHEDULES[plans.schedule].default_chunks)
            ends = ends_in_flight(plans.schedule, pp, chunks, m) if pp > 1 else Ends(1, 1, 1)
            layers = tuple(stage_layers(model, plans, pp * chunks)) if pp > 1 else ()
            seen: Counter[tuple[Stage, Pattern]] = Counter()
            for number, stage, shape, repeats in _stages(
                model, plans.framework, plans.schedule, plans.layers_per_stage, pp, virtual, every
            ):
                if structure.sharding == "zero1":  # whose states depend on all layers together
                    shape = (stage, shape[1])
                nth = seen[shape]  # a plan is in each group once
                seen[shape] += 1
                for fresh, which, held in _held(plans.schedule, pp, chunks, m, number, ends, layers):
                    last = np.ones_like(held) if plans.schedule in ONE_STAGE and virtual == 1 else held.copy()
                    last[2:] = 1  # whichever stage it is, the head is through with the others
                    found.setdefault((*shape, nth, fresh), []).append((some[which], number, repeats, held[:, which], last[:, which]))
                    stages[(*shape, nth, fresh)] = stage
    return [_joined(stages[k], entries, k[-1]) for k, entries in sorted(found.items(), key=lambda pair: pair[0][-1])]


def _held(
    schedule: str, pp: int, chunks: int, m: IntColumn, rank: int, ends: Ends, layers: tuple[int, ...]
) -> list[tuple[bool, NDArray[np.bool_] | slice, NDArray[np.float64]]]:
    """(before the first backward pass, of which plans, micro-batches that a rank holds of each of `PIECES`) of one rank of a pipeline. 1F1B: a rank that warms
    up with every micro-batch of the step holds one fewer once gradients exist."""
    held = np.ones((len(PIECES), len(m)))
    if pp == 1:
        return [(False, slice(None), held)]
    held[0] = in_flight_of_layers(schedule, chunks, m, rank, layers)
    if SCHEDULES[schedule].placement == "bidirectional":
        held[0] = np.maximum(held[0] / 2, 1)  # counted in stages, and a rank's share is two of them
    for row, most in zip(held[1:], ends):
        row[:] = most
    fewer = np.maximum(held - 1, 1)
    if schedule in FORWARDS_FIRST:
        return [(False, slice(None), fewer), (True, slice(None), held)]
    every = held[0] >= m
    if schedule != "1f1b" or not every.any():
        return [(False, slice(None), held)]
    return [(False, slice(None), np.where(every, fewer, held)), (True, every, held)]


def pieces_of(marks: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """[parts, rows] bytes that one micro-batch keeps of each of `PIECES`; they add up to all. `marks`: all that it saves, and such of its `ENDS` as are
    counted apart."""
    layers = np.maximum(marks["saved"], 0)  # parameters that a forward pass gathers late and frees are no saving
    found: dict[str, NDArray[np.int64]] = {}
    for name in ("embedding", "head"):
        if name in marks:
            found[name] = np.clip(marks[name], 0, layers)
            layers = layers - found[name]
    if "head" in found:
        found["loss"] = np.clip(marks["loss"], 0, found["head"])
        found["head"] = found["head"] - found["loss"]
    return {"layers": layers, **found}


def of_others(pieces: dict[str, NDArray[np.int64]], held: NDArray[np.float64]) -> dict[str, NDArray[np.int64]]:
    """[parts, rows] bytes of each piece that the other micro-batches in flight keep."""
    return {name: np.rint(np.maximum(held[PIECES.index(name)] - 1, 0) * piece).astype(np.int64) for name, piece in pieces.items()}


def _joined(stage: Stage, entries: list[Entry], fresh: bool) -> Rank:
    rows = np.concatenate([e[0] for e in entries])
    order = np.argsort(rows, kind="stable")  # the order of the table, as everything else that belongs to its rows
    number, repeats = (np.concatenate([np.full(len(e[0]), e[k], dtype=np.int64) for e in entries])[order] for k in (1, 2))
    held, last = (np.concatenate([e[k] for e in entries], axis=1)[:, order] for k in (3, 4))
    return Rank(stage, rows[order], number, repeats, held, last, fresh)


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
