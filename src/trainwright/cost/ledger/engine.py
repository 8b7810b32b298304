"""The ledger's replay of a step at the granularity of phases: what is alive at each moment, on each class of pipeline ranks; the peak is
the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, PHASES, STATES, MemoryTable
from ..table import Column, PlanTable
from .accounts import Offloaded, Rank, accounts, offload
from .activations import BlockBytes, LossBytes, block_bytes, by_kernels, embedding_masks, loss_bytes
from .items import POOLS, Happening, Item, item, sum_of
from .ranks import Slot, in_flight, slots
from .scope import Scope
from .weights import Held, held, largest_weight, nothing

MOMENTS = ("after load", "end of forward", "loss backward", "first block backward", "end of backward", "optimizer step")


@dataclass(frozen=True)
class Pieces:
    """What does not depend on the pipeline rank, once for a structure."""

    scope: Scope
    blocks: dict[str, BlockBytes]
    loss: LossBytes
    layers: dict[str, Held]
    embedding: Held
    head: Held
    tied_copy: Held
    largest_layer: Column
    largest_end: Column
    mtp: Held
    mtp_bytes: Column


def pieces(scope: Scope) -> Pieces:
    model = scope.model
    kernels = by_kernels(scope)[0][0]
    layers = {name: held(block, scope, kernels) for name, block in model.blocks.items()}
    embedding, head = held(model.embedding, scope, kernels, ends=True), held(model.head, scope, kernels, ends=True)
    nobody = nothing(len(scope))
    mtp, mtp_bytes = nobody, np.zeros(len(scope))
    for block in model.mtp:
        mtp = mtp + held(block, scope, kernels)
        mtp_bytes = mtp_bytes + block_bytes(block, scope).kept
    return Pieces(
        scope=scope,
        blocks={name: block_bytes(block, scope) for name, block in model.blocks.items()},
        loss=loss_bytes(scope),
        layers=layers,
        embedding=embedding,
        head=head,
        tied_copy=embedding if model.tied else nobody,
        largest_layer=largest_weight(list(model.blocks.values()), scope),
        largest_end=largest_weight([model.embedding, model.head], scope),
        mtp=mtp,
        mtp_bytes=mtp_bytes,
    )


def rank_weights(p: Pieces, slot: Slot) -> Rank:
    """The weights on a class of ranks. A tied head on a rank without the embedding holds a copy of the table."""
    copies = slot.head * (1.0 - slot.embedding)
    ends = p.embedding.scaled(slot.embedding) + p.head.scaled(slot.head) + p.tied_copy.scaled(copies)
    mine = ends + p.mtp.scaled(slot.head)
    layer = nothing(len(p.scope))
    for name, count in slot.layers.items():
        mine = mine + p.layers[name].scaled(count)
        here = p.layers[name].scaled(np.minimum(count, 1.0))
        larger = here.everything > layer.everything
        layer = Held(**{f: np.where(larger, getattr(here, f), getattr(layer, f)) for f in here.__dataclass_fields__})
    at_end = np.where((slot.embedding > 0) | (slot.head > 0), p.largest_end, 0.0)
    return Rank(mine, ends, layer, np.maximum(p.largest_layer, at_end))


def stage_activations(p: Pieces, slot: Slot) -> tuple[Column, Column, Column]:
    """(kept by one micro-batch on the rank, most that a block's backward adds to it, most that it holds when nothing else is left)."""
    scope = p.scope
    kept, adds, alone = np.zeros(len(scope)), np.zeros(len(scope)), np.zeros(len(scope))
    every = float(max(scope.structure.recompute_every, 1)) if scope.structure.recompute == "full" else 1.0
    for name, count in slot.layers.items():
        block, here = p.blocks[name], np.minimum(count, 1.0)
        if scope.structure.recompute == "full":
            groups = np.ceil(count / every)
            span = np.minimum(every, count)
            kept = kept + groups * block.input
            working = (span - 1) * block.full + np.maximum(block.backward, block.full)
            adds = np.maximum(adds, here * (working - block.input))
        else:
            kept = kept + count * block.kept
            working = np.maximum(block.backward, block.full)
            adds = np.maximum(adds, here * (working - block.kept))
        alone = np.maximum(alone, here * working)
    return kept, np.maximum(adds, 0.0), alone


def happenings(p: Pieces, slot: Slot, rank: Rank) -> tuple[list[Happening], Offloaded, Column]:
    """The moments of a step on a class of ranks, in order; what offload moved away; and what one micro-batch leaves for backward."""
    scope = p.scope
    moved = offload(scope, accounts(scope, rank))
    a = moved.accounts
    kept, adds, alone = stage_activations(p, slot)
    kept = kept + embedding_masks(scope) * slot.embedding + p.mtp_bytes * slot.head
    flying = in_flight(scope, slot.rank)
    layer_count = sum(slot.layers.values(), np.zeros(len(scope)))
    saved_all, adds, alone = _offloaded_activations(scope, kept * flying, adds, alone, layer_count)
    saved = item(
        "saved for backward, all micro-batches in flight", "activations", saved_all, "layers x saved bytes x in flight", "arXiv:2205.05198"
    )
    head = item("saved by final norm and head", "activations", p.loss.saved * slot.head, "final norm and head input")
    others = np.maximum(flying - 1, 0) * np.where(flying > 0, saved_all / np.maximum(flying, 1e-9), 0.0)
    resident = (*a.parameters, *a.masters, *a.optimizer, *a.always, *_outputs_in_flight(scope, flying))
    early = tuple(g.masked(np.broadcast_to(np.asarray(a.early, dtype=np.float64), (len(scope),))) for g in a.gradients)
    recomputed = item("backward of a block", "activations", adds, "recomputed tensors, gradients and temporaries of the worst row")
    last = (
        item("saved by micro-batches still in flight", "activations", others, "(in flight - 1) x saved bytes"),
        item("backward of the last block", "activations", alone, "saved tensors, gradients and temporaries of the worst row"),
    )

    def logits(size: Column, what: str) -> Item:
        return item(f"logits and loss, {what}", "logits", size * slot.head, "bytes a logit x tokens x vocabulary share")

    found = [
        Happening("after load", "load", (*a.parameters, *a.masters)),
        Happening("end of forward", "forward", (*resident, *early, saved, head, logits(p.loss.forward, "forward"), *a.loss)),
        Happening("loss backward", "backward", (*resident, *early, saved, head, logits(p.loss.backward, "backward"), *a.loss)),
        Happening("first block backward", "backward", (*resident, *early, saved, recomputed, *a.block)),
        Happening("end of backward", "backward", (*resident, *a.gradients, *last, *a.last)),
        Happening("optimizer step", "optimizer", (*resident, *a.gradients, *a.step)),
    ]
    return found, moved, kept + p.loss.saved * slot.head + p.loss.kept * slot.head


def _offloaded_activations(scope: Scope, saved: Column, adds: Column, alone: Column, layers: Column) -> tuple[Column, Column, Column]:
    """activations-cpu: what is saved leaves the card; two layers' worth stays (one being copied out, one being fetched)."""
    if scope.structure.offload != "activations-cpu":
        return saved, adds, alone
    return np.minimum(saved, 2 * saved / np.maximum(layers, 1)), adds, alone


def _outputs_in_flight(scope: Scope, flying: Column) -> tuple[Item, ...]:
    """DeepSpeed's pipeline keeps each stage's output until its gradient arrives; Megatron frees it (``deallocate_pipeline_outputs``)."""
    if scope.structure.framework != "deepspeed":
        return ()
    size = scope.sequence_tokens * scope.model.hidden * scope.c * flying * (scope.pp > 1)
    return (
        item(
            "stage outputs in flight", "communication_buffers", size, "2 N h x in flight", "deepspeed/runtime/pipe/engine.py pipe_buffers"
        ),
    )


def memory_rows(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> MemoryTable:
    """`MemoryTable` of the plans of one structure: the worst moment of the worst pipeline rank of each."""
    scope = Scope(model, cluster, job, structure, table)
    p, n = pieces(scope), len(table)
    best = np.full(n, -1.0)
    zero: Column = np.zeros(n)
    out = dict.fromkeys(PARTS, zero)
    states = dict.fromkeys(STATES, zero)
    phases = dict.fromkeys(PHASES, zero)
    rank_column, moment_column, saved_column, moved_column, reserved = zero, zero, zero, zero, zero
    for slot in slots(scope):
        found, moved, saved = happenings(p, slot, rank_weights(p, slot))
        exists = slot.exists > 0
        rank_best = np.full(n, -1.0)
        rank_moment, rank_phases = zero, dict.fromkeys(PHASES, zero)
        totals = [h.total() for h in found]
        held_pools = [h.pools(n) for h in found]
        pooled = np.sum([np.max([p[pool] for p in held_pools], axis=0) for pool in POOLS], axis=0) + sum_of(moved.accounts.leftovers, n)
        pooled = pooled + np.rint(p.loss.stale * slot.head)
        for k, (h, size) in enumerate(zip(found, totals)):
            rank_phases[h.phase] = np.maximum(rank_phases[h.phase], size)
            rank_moment = np.where(size > rank_best, float(k), rank_moment)
            rank_best = np.maximum(rank_best, size)
        wins = exists & (rank_best > best)
        for k, h in enumerate(found):
            rows = wins & (rank_moment == k)
            if rows.any():
                parts = h.parts(n)
                out = {part: np.where(rows, parts[part], out[part]) for part in PARTS}
        a = moved.accounts
        mine = {"parameters": a.parameters, "master_weights": a.masters, "gradients": a.gradients, "optimizer": a.optimizer}
        states = {part: np.where(wins, sum_of(mine[part], n), states[part]) for part in STATES}
        phases = {phase: np.where(wins, rank_phases[phase], phases[phase]) for phase in PHASES}
        rank_column = np.where(wins, slot.rank, rank_column)
        moment_column = np.where(wins, rank_moment, moment_column)
        saved_column = np.where(wins, np.rint(saved), saved_column)
        moved_column = np.where(exists, np.maximum(moved_column, sum_of(moved.moved, n)), moved_column)
        reserved = np.where(exists, np.maximum(reserved, pooled), reserved)
        best = np.where(wins, rank_best, best)
    from .detail import LedgerDetail

    return MemoryTable.build(
        n,
        {part: whole(column) for part, column in out.items()},
        {part: whole(column) for part, column in states.items()},
        whole(saved_column),
        {phase: whole(column) for phase, column in phases.items()},
        detail=LedgerDetail(model, cluster, job, structure, table),
        peak_phase=_phase_of_moments()[moment_column.astype(np.int64)],
        peak_moment=moment_column.astype(np.int64),
        moments=MOMENTS,
        pipeline_rank=rank_column.astype(np.int64),
        extra={"offloaded_bytes": whole(moved_column), "pooled_bytes": whole(reserved)},
    )


def whole(column: Column) -> np.ndarray:
    return np.rint(column).astype(np.int64)


def _phase_of_moments() -> np.ndarray:
    names = ("load", "forward", "backward", "backward", "backward", "optimizer")
    return np.array([PHASES.index(x) for x in names], dtype=np.int64)
