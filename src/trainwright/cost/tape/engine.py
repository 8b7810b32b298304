"""Plans of one structure -> `MemoryTable`: rows are grouped by variant and stage, each group is one matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, PHASES, STATES, MemoryTable, Moment, Term, scatter
from ..table import IntColumn, PlanTable
from .program import Pattern, Program, make, pattern
from .setup import Setup, Stage, Variant
from .sizes import Columns
from .step import Step

EXACT = 2.0**53
SOURCE = "replay of torch 2.13's allocations"


def memory_rows(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> MemoryTable:
    """`MemoryTable` of plans of one structure; bytes are exact whole numbers."""
    parts, where = [], []
    for variant, rows in variants(model, structure, table):
        parts.append(_group(model, job, structure, variant, table.take(rows)))
        where.append(rows)
    return scatter(parts, where)


def variants(model: ModelSpec, structure: Structure, table: PlanTable) -> Iterator[tuple[Variant, NDArray[np.intp]]]:
    """Rows that replay alike."""
    flags = (
        table.tp > 1,
        table.accumulation > 1,
        (table.dp_replicate > 1) & (structure.sharding != "none"),
        table.cp > 1,
        table.dp > 1,
        table.ep > 1,
        table.micro_batch_size > 1,
        -(-model.kv_heads // table.tp) == 1,
    )
    code = sum(f.astype(np.int64) << i for i, f in enumerate(flags))
    for value in np.unique(code):
        yield Variant(*(bool(value >> i & 1) for i in range(len(flags)))), np.flatnonzero(code == value)


@lru_cache(maxsize=4096)
def program(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, stage: Stage) -> tuple[Program, Pattern]:
    """The matrices of a structure, replayed once."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    shape = pattern(stage.layers, every)
    return make(Setup(model, job, structure, variant, stage), shape), shape


def _columns(structure: Structure, job: TrainingJob, table: PlanTable) -> Columns:
    columns = Columns.of(table, job.seq_len)
    if structure.framework == "ddp":
        return columns.with_(shards=table.dp_shard)
    return columns if structure.sharding != "none" else columns.with_(shards=np.ones_like(columns.shards))


def _group(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, table: PlanTable) -> MemoryTable:
    stage = Stage(model.layers)
    found, shape = program(model, job, structure, variant, stage)
    columns = _columns(structure, job, table)
    sizes = np.stack([np.broadcast_to(s.value(columns), (len(table),)) for s in found.symbols]).astype(np.int64)
    live = product(found.at(shape.repeats), sizes)
    phases = {name: np.zeros(len(table), np.int64) for name in PHASES}
    for k, name in enumerate(PHASES):
        at = found.moments.phase == k
        if at.any():
            phases[name] = live[at].max(axis=0)
    peak_moment = live.argmax(axis=0)
    breakdown = _breakdown(found, shape, sizes, peak_moment)
    owned = dict(zip(PARTS, product(found.mark("owned", shape.repeats), sizes)))
    after = dict(zip(PARTS, product(found.mark("after backward", shape.repeats), sizes)))
    phases["load"] = owned["parameters"] + owned["master_weights"]
    phases["optimizer"] = np.maximum(phases["optimizer"], sum(after.values()))
    states = {name: (after if name == "gradients" else owned)[name] for name in STATES}
    return MemoryTable.build(
        len(table),
        breakdown,
        states,
        product(found.mark("saved", shape.repeats).sum(axis=0)[None], sizes)[0],
        phases,
        detail=Detail(model, job, structure, table),
        peak_phase=found.moments.phase[peak_moment],
        peak_moment=peak_moment,
        moments=found.moments.names,
    )


def product(matrix: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole-number matrix product: in floats (BLAS) while every sum is below 2^53, where they are exact."""
    bound = np.abs(matrix).astype(float) @ np.abs(sizes).max(axis=1, initial=0).astype(float)
    if bound.max(initial=0.0) < EXACT:
        return np.rint(matrix.astype(float) @ sizes.astype(float)).astype(np.int64)
    return matrix @ sizes


def _breakdown(found: Program, shape: Pattern, sizes: NDArray[np.int64], moment: IntColumn) -> dict[str, IntColumn]:
    result = np.zeros((len(PARTS), sizes.shape[1]), dtype=np.int64)
    for m in np.unique(moment):
        rows = moment == m
        result[:, rows] = product(found.parts(int(m), shape.repeats), sizes[:, rows])
    return dict(zip(PARTS, result))


class Detail:
    """Answers for one row by replaying it whole, with every storage's name."""

    def __init__(self, model: ModelSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> None:
        self.model, self.job, self.structure, self.table = model, job, structure, table

    def _replayed(self, row: int) -> tuple[Step, list[int]]:
        table = self.table.take(np.array([row]))
        variant, _ = next(variants(self.model, self.structure, table))
        setup = Setup(self.model, self.job, self.structure, variant, Stage(self.model.layers))
        step = Step(setup, [self.model.blocks[name] for name in self.model.layers], named=True)
        step.replay()
        columns = _columns(self.structure, self.job, table)
        return step, [int(np.broadcast_to(s.value(columns), (1,))[0]) for s in step.symbols.table]

    def terms(self, row: int) -> list[Term]:
        """What is alive at the peak, by name and size, largest first."""
        step, values = self._replayed(row)
        tape = step.tape
        best = max(range(len(tape.moments)), key=lambda i: sum(values[k // len(PARTS)] * n for k, n in tape.moments[i][2].items()))
        found = []
        for (what, part, symbol), count in tape.named[best].items():
            total = count * values[symbol]
            formula = step.symbols.table[symbol].formula
            numbers = f"{count:,}" if formula == "1" else f"{count:,} x {values[symbol]:,}"
            found.append(Term(what, PARTS[part], f"{count:,} x {formula}" if formula != "1" else f"{count:,}", numbers, total, SOURCE))
        return sorted(found, key=lambda t: -t.bytes)

    def timeline(self, row: int) -> list[Moment]:
        """Local peaks of the step in order."""
        step, values = self._replayed(row)
        moments = []
        for (phase, layer, _), what, live in step.tape.moments:
            parts = dict.fromkeys(PARTS, 0)
            for key, count in live.items():
                parts[PARTS[key % len(PARTS)]] += count * values[key // len(PARTS)]
            place = f"layer {layer}: " if 0 <= layer < len(self.model.layers) else ""
            moments.append(Moment(f"{place}{what}", phase, parts))
        return moments
