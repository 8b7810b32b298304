"""Plans of one structure -> `MemoryTable`: rows are grouped by variant and pipeline rank, each group is one matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...frameworks import FRAMEWORKS
from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, PHASES, STATES, MemoryTable, scatter
from ..table import PlanTable, different
from .detail import Detail
from .pipeline import Rank, of_others, pieces_of, ranks
from .program import FEW, Pattern, Program, make, pattern
from .ring import MOST
from .setup import Setup, Stage, Variant, reduces_every_micro_batch
from .sizes import Columns

EXACT = 2.0**53
ALONE = 2**18  # of more multiplications OpenBLAS wakes its threads (interface/gemm.c), which takes longer than these products do
CHUNK = 2**14  # plans at a time: their columns stay in the processor's cache


def memory_rows(
    model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable, limit: int | None = None
) -> MemoryTable:
    """`MemoryTable` of plans of one structure; bytes are exact whole numbers. With a `limit` a plan is looked at up to the first pipeline rank that
    needs more: what it says of such a plan is that rank's."""
    parts, where = [], []
    for variant, rows in variants(model, structure, table):
        for start in range(0, len(rows), CHUNK):
            some = rows[start : start + CHUNK]
            parts.append(_worst(model, job, structure, variant, table.take(some), limit))
            where.append(some)
    return scatter(parts, where)


def saved_by_layer(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> NDArray[np.float64]:
    """[kinds, plans] bytes that the forward pass of one micro-batch leaves for backward in a layer of the middle of a stage (in `recompute_every` of them with
    full recomputation), for each of `ModelSpec.counts`. Zero where no layer repeats."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    if structure.sharding == "zero1":
        structure = replace(structure, sharding="none")  # its states alone differ
    found = np.zeros((len(model.counts), len(table)))
    for variant, rows in variants(model, structure, table):
        sizes = columns_of(structure, job, table.take(rows))
        for k, kind in enumerate(dict.fromkeys(model.layers)):
            replayed, _ = program(model, job, structure, variant, Stage((kind,) * (FEW + 1) * every))
            matrix = replayed.marks["saved"][1, PARTS.index("activations")]
            found[k, rows] = sum((matrix[i] * replayed.symbols[i].value(sizes) for i in np.flatnonzero(matrix)), np.zeros(len(rows)))
    return found


def variants(model: ModelSpec, structure: Structure, table: PlanTable) -> Iterator[tuple[Variant, NDArray[np.intp]]]:
    """Rows that replay alike."""
    eager = structure.attention in ("eager", "sdpa-math")
    never = np.zeros(len(table), dtype=bool)
    flags = (
        table.tp > 1,
        table.dp > 1 if structure.sharding == "none" or structure.framework == "ddp" else never,
        table.micro_batch_size > 1 if eager else never,
        -(-model.kv_heads // table.tp) == 1 if structure.attention != "flash" and model.kv_heads < model.heads else never,
    )
    code = sum((f.astype(np.int64) << i for i, f in enumerate(flags)), np.minimum(table.cp, MOST) << len(flags))
    for value in different(code):
        tensor, data, batched, single_kv = (bool(value >> i & 1) for i in range(len(flags)))
        yield Variant(tensor, data, batched, single_kv, int(value >> len(flags))), np.flatnonzero(code == value)


def program(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, stage: Stage) -> tuple[Program, int]:
    """The matrices of a stage and how often its unit repeats; stages that differ only in that share them."""
    every = structure.recompute_every if structure.recompute == "full" else 1
    shape = pattern(stage.layers, every)
    most = min(shape.repeats, FEW + 1)
    if structure.sharding != "zero1":  # whose states depend on all layers together
        stage = replace(stage, layers=shape.layers(most))
    return _program(model, _job_key(job), _structure_key(structure, variant), variant, stage, replace(shape, repeats=most)), shape.repeats


@lru_cache(maxsize=4096)
def _program(model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, stage: Stage, shape: Pattern) -> Program:
    return make(Setup(model, job, structure, variant, stage), shape)


def _job_key(job: TrainingJob) -> TrainingJob:
    """A job without what no replay asks for: its numbers of tokens are columns."""
    return replace(job, seq_len=0, global_batch_size=0, tokens=None, packing=False, mean_document_len=None, fp8_recipe=None)


def _structure_key(structure: Structure, variant: Variant) -> Structure:
    """A structure without what no replay asks for."""
    return Structure(
        schedule="gpipe" if structure.schedule == "gpipe" else "1f1b",  # what a stage that has sent a gradient still holds
        framework=structure.framework,
        sharding=structure.sharding,
        sequence_parallel=structure.sequence_parallel and variant.tensor,
        recompute=structure.recompute,
        recompute_every=structure.recompute_every,
        recompute_modules=structure.recompute_modules,
        attention=structure.attention,
        cp_kind=structure.cp_kind if variant.context > 1 else "ring",
        reshard_root=structure.reshard_root or structure.sharding != "zero3",
        options=(("no_sync", False),) if reduces_every_micro_batch(structure) else (),
    )


def columns_of(structure: Structure, job: TrainingJob, table: PlanTable) -> Columns:
    """What sizes are computed from. FSDP2 cuts parameters over dp_shard x cp, ZeroRedundancyOptimizer deals them over dp_shard."""
    columns = Columns.of(table, job.seq_len)
    if not FRAMEWORKS[structure.framework].shards_over_cp:
        return columns.with_(shards=table.dp_shard)
    if reduces_every_micro_batch(structure):  # pipeline stages put reduction off all the same
        several = table.accumulation > 1
        columns = columns.with_(
            accumulated=(several & (table.pp > 1)).astype(np.int64), summed=(several & (table.pp == 1)).astype(np.int64)
        )
    return columns if structure.sharding != "none" else columns.with_(shards=np.ones_like(columns.shards))


def _worst(
    model: ModelSpec, job: TrainingJob, structure: Structure, variant: Variant, table: PlanTable, limit: int | None = None
) -> MemoryTable:
    """Each plan at its worst pipeline rank, or the first one beyond `limit`."""
    columns = columns_of(structure, job, table)
    found: list[MemoryTable] = []
    where = []
    best = np.full(len(table), -1, dtype=np.int64)
    owner = np.zeros(len(table), dtype=np.int64)
    for rank in ranks(model, structure, table):
        if limit is not None:
            rank = rank.only(best[rank.rows] <= limit)
        rows = rank.rows
        if not len(rows):
            continue
        given = columns if not rank.fresh else columns.with_(accumulated=np.zeros_like(columns.accumulated))
        whole = np.array_equal(rows, np.arange(len(table)))
        some, given = (table, given) if whole else (table.take(rows), given.take(rows))
        here = _on_rank(model, job, structure, variant, some, given, rank)
        better = here.peak_bytes > best[rows]
        best[rows[better]], owner[rows[better]] = here.peak_bytes[better], len(found)
        found.append(here)
        where.append(rows)
    if len(found) == 1:
        return scatter(found, where)
    chosen = [np.flatnonzero(owner[rows] == k) for k, rows in enumerate(where)]
    return scatter([t.take(c) for t, c in zip(found, chosen) if len(c)], [rows[c] for rows, c in zip(where, chosen) if len(c)])


def _on_rank(
    model: ModelSpec,
    job: TrainingJob,
    structure: Structure,
    variant: Variant,
    table: PlanTable,
    columns: Columns,
    rank: Rank,
) -> MemoryTable:
    n = len(table)
    found, _ = program(model, job, structure, variant, rank.stage)
    sizes = np.empty((len(found.symbols), n), dtype=np.float64)
    for i, symbol in enumerate(found.symbols):
        sizes[i] = symbol.value(columns)
    more = rank.repeats - found.few

    def total(pair: tuple[NDArray[np.int64], NDArray[np.int64]] | NDArray[np.int64]) -> NDArray[np.int64]:
        base = product(pair[0], sizes)
        return base if not more.any() else base + more * product(pair[1], sizes)

    saved = total(found.marks["saved"])
    kept = np.zeros((3, *saved.shape), dtype=np.int64)  # by `Program.others`
    live = total(found.totals)
    if rank.stage.piped:
        pieces = pieces_of({"saved": saved, **{name: total(found.marks[name]) for name in rank.apart}})
        kept[:2] = [sum(of_others(pieces, held).values()) for held in (rank.held, rank.last)]
        live += kept.sum(axis=1)[found.others]
    phases = {name: np.zeros(n, np.int64) for name in PHASES}
    for k, name in enumerate(PHASES):
        at = found.phase == k
        if at.any():
            phases[name] = live[at].max(axis=0)
    moment = live.argmax(axis=0)
    breakdown = np.zeros((len(PARTS), n), dtype=np.int64)
    for m in different(moment):
        at = np.flatnonzero(moment == m)
        part = product(found.base[m], sizes[:, at]) + more[at] * product(found.slope[m], sizes[:, at])
        breakdown[:, at] = part + kept[found.others[m]][:, at]
    owned = total(found.marks["owned"])
    after = total(found.marks["after backward"])
    phases["load"] = owned[:2].sum(axis=0)
    return MemoryTable.build(
        n,
        dict(zip(PARTS, breakdown)),
        {name: (after if name == "gradients" else owned)[PARTS.index(name)] for name in STATES},
        np.maximum(saved, 0).sum(axis=0),
        phases,
        detail=Detail(model, job, structure, table, rank, variant, columns),
        peak_phase=found.phase[moment],
        peak_moment=moment,
        moments=found.names,
        pipeline_rank=rank.number,
    )


def product(matrix: NDArray[np.int64], sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole-number matrix product in floats (BLAS), which are exact while every partial sum stays below 2^53; else in integers."""
    used = np.flatnonzero(matrix.any(axis=0))
    left, right = matrix[:, used].astype(np.float64), sizes[used]
    if (np.abs(left) @ right.max(axis=1, initial=0.0)).max(initial=0.0) < EXACT:
        most = max(1, ALONE // max(left.size, 1))
        return np.hstack([left @ right[:, k : k + most] for k in range(0, max(right.shape[1], 1), most)]).astype(np.int64)
    return matrix[:, used] @ right.astype(np.int64)
