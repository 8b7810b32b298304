"""Plans of one structure -> `MemoryTable`: rows are grouped by variant and pipeline rank, each group is one matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, PHASES, STATES, MemoryTable, scatter
from ..table import IntColumn, PlanTable
from .detail import Detail
from .pipeline import Rank, groups, ranks
from .program import FEW, Pattern, Program, make, pattern
from .setup import Setup, Stage, Variant
from .sizes import Columns

EXACT = 2.0**53
CHUNK = 2**14  # plans at a time: their columns stay in the processor's cache


def memory_rows(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> MemoryTable:
    """`MemoryTable` of plans of one structure; bytes are exact whole numbers."""
    parts, where = [], []
    for variant, rows in variants(model, structure, table):
        for start in range(0, len(rows), CHUNK):
            some = rows[start : start + CHUNK]
            for inside in groups(table.take(some)):
                parts.append(_worst(model, job, structure, variant, table.take(some[inside])))
                where.append(some[inside])
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


def program(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, stage: Stage) -> tuple[Program, Pattern]:
    """The matrices of a stage; stages that differ only in how often a unit repeats share them."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    shape = pattern(stage.layers, every)
    if structure.sharding != "zero1":  # whose states depend on all layers together
        stage = replace(stage, layers=shape.layers(min(shape.repeats, FEW + 1)))
    return _program(model, job, structure, variant, stage, replace(shape, repeats=min(shape.repeats, FEW + 1))), shape


@lru_cache(maxsize=4096)
def _program(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, stage: Stage, shape: Pattern) -> Program:
    return make(Setup(model, job, structure, variant, stage), shape)


def columns_of(structure: Structure, job: TrainingJob, table: PlanTable) -> Columns:
    """What sizes are computed from. FSDP2 cuts parameters over dp_shard x cp, ZeroRedundancyOptimizer deals them over dp_shard."""
    columns = Columns.of(table, job.seq_len)
    if structure.framework == "ddp":
        return columns.with_(shards=table.dp_shard)
    return columns if structure.sharding != "none" else columns.with_(shards=np.ones_like(columns.shards))


def _worst(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, table: PlanTable) -> MemoryTable:
    """Each plan at its worst pipeline rank."""
    columns = columns_of(structure, job, table)
    found = [_on_rank(model, job, structure, variant, table, columns, rank) for rank in ranks(model, structure, table)]
    if len(found) == 1:
        return found[0]
    best = np.stack([t.peak_bytes for t in found]).argmax(axis=0)
    rows = [np.flatnonzero(best == k) for k in range(len(found))]
    return scatter([t.take(r) for t, r in zip(found, rows) if len(r)], [r for r in rows if len(r)])


def _on_rank(
    model: ModelSpec,
    job: TrainingJob,
    structure: Structure,
    variant: Variant,
    table: PlanTable,
    columns: Columns,
    rank: Rank,
) -> MemoryTable:
    found, shape = program(model, job, structure, variant, rank.stage)
    n, m = len(table), shape.repeats
    sizes = np.stack([np.broadcast_to(s.value(columns), (n,)) for s in found.symbols]).astype(np.int64)
    saved = dict(zip(PARTS, product(found.mark("saved", m), sizes)))
    others = {part: np.rint(np.maximum(rank.held - 1, 0) * saved[part]).astype(np.int64) for part in PARTS}
    in_step = found.moments.phase != PHASES.index("optimizer")
    live = product(found.at(m), sizes) + in_step[:, None] * sum(others.values())
    phases = {name: np.zeros(n, np.int64) for name in PHASES}
    for k, name in enumerate(PHASES):
        at = found.moments.phase == k
        if at.any():
            phases[name] = live[at].max(axis=0)
    moment = live.argmax(axis=0)
    breakdown = _breakdown(found, m, sizes, moment)
    breakdown = {part: breakdown[part] + in_step[moment] * others[part] for part in PARTS}
    owned = dict(zip(PARTS, product(found.mark("owned", m), sizes)))
    after = dict(zip(PARTS, product(found.mark("after backward", m), sizes)))
    phases["load"] = owned["parameters"] + owned["master_weights"]
    return MemoryTable.build(
        n,
        breakdown,
        {name: (after if name == "gradients" else owned)[name] for name in STATES},
        sum(saved.values(), np.zeros(n, np.int64)),
        phases,
        detail=Detail(model, job, structure, table, rank, variant, columns),
        peak_phase=found.moments.phase[moment],
        peak_moment=moment,
        moments=found.moments.names,
        pipeline_rank=np.full(n, rank.number, dtype=np.int64),
    )


def product(matrix: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole-number matrix product: in floats (BLAS) while every sum is below 2^53, where they are exact."""
    bound = np.abs(matrix).astype(float) @ np.abs(sizes).max(axis=1, initial=0).astype(float)
    if bound.max(initial=0.0) < EXACT:
        return np.rint(matrix.astype(float) @ sizes.astype(float)).astype(np.int64)
    return matrix @ sizes


def _breakdown(found: Program, repeats: int, sizes: NDArray[np.int64], moment: IntColumn) -> dict[str, IntColumn]:
    result = np.zeros((len(PARTS), sizes.shape[1]), dtype=np.int64)
    for m in np.unique(moment):
        rows = moment == m
        result[:, rows] = product(found.parts(int(m), repeats), sizes[:, rows])
    return dict(zip(PARTS, result))
