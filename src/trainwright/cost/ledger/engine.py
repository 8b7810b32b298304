"""The ledger's replay of a step at the granularity of phases: what is alive at each moment, on each class of pipeline ranks; the peak is
the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schedules.actions import Ends
from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..distinct import distinct
from ..memory_table import PARTS, PHASES, MemoryTable, concatenate
from ..table import Column, IntColumn, PlanTable, different
from .accounts import Offloaded, Rank, offload, paged
from .activations import (
    BlockBytes,
    LossBytes,
    block_bytes,
    block_input_bytes,
    block_kept,
    by_kernels,
    embedding_masks,
    logits_gradient,
    loss_bytes,
)
from .detail import SAVED, LedgerDetail
from .items import POOLS, Happening, Item, item, sum_of
from .pytorch import accounts
from .ranks import Slot, classes, ends_in_flight, in_flight, slots
from .scope import Scope, add_up
from .weights import Held, held, largest_weight, nothing, table_copies

MOMENTS = ("after load", "end of forward", "loss backward", "first block backward", "end of backward", "optimizer step")
PHASE_OF_MOMENT = np.array([PHASES.index(x) for x in ("load", "forward", "backward", "backward", "backward", "optimizer")])
CHUNK = 2**15  # plans at a time: their columns stay in the processor's cache


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


def shared_pieces(scope: Scope) -> Pieces:
    """`pieces`, computed once for plans that differ only in what the pieces do not depend on (pipeline depth, replicas, accumulation, schedule, offload)."""
    t = scope.table
    first, where = distinct([t.micro_batch_size, t.tp, t.cp, t.ep, t.etp, (t.pp > 1).astype(np.int64)])
    s = scope.structure
    alike = replace(
        s, schedule="1f1b", layers_per_stage=None, offload="none", sharding=s.sharding if scope.job.method == "qlora" else "none"
    )
    few, places = _known(scope.model, scope.job, alike).of(replace(scope, structure=alike, table=t.take(first)))
    return Pieces(scope, **{f.name: _take(getattr(few, f.name), places[where]) for f in fields(Pieces) if f.name != "scope"})


def _shape(t: PlanTable) -> list[IntColumn]:
    """What the pieces of a structure depend on; of stages and replicas only whether there are several."""
    return [t.micro_batch_size, t.tp, t.cp, t.ep, t.etp, (t.pp > 1).astype(np.int64), (t.dp * t.cp > 1).astype(np.int64)]


@dataclass
class Known:
    """The pieces of every shape of a rank's work that was asked for, of one model, job and structure."""

    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)
    made: Pieces | None = None

    def of(self, scope: Scope) -> tuple[Pieces, NDArray[np.intp]]:
        """Pieces, and which of them are those of each plan; the plans are of different shapes."""
        keys = list(zip(*(column.tolist() for column in _shape(scope.table))))
        new = [i for i, key in enumerate(keys) if key not in self.shapes]
        if self.made is None or new:
            more = pieces(replace(scope, table=scope.table.take(np.array(new, dtype=np.intp))))
            self.made = more if self.made is None else _joined(self.made, more)
            for i in new:
                self.shapes[keys[i]] = len(self.shapes)
        return self.made, np.array([self.shapes[key] for key in keys], dtype=np.intp)


@lru_cache(maxsize=256)
def _known(model: ModelSpec, job: TrainingJob, structure: Structure) -> Known:
    return Known()


def _take(value: Any, rows: NDArray[np.intp]) -> Any:
    return _each(lambda column: column[rows], value)


def _joined(a: Pieces, b: Pieces) -> Pieces:
    parts = {f.name: _each(lambda *both: np.concatenate(both), getattr(a, f.name), getattr(b, f.name)) for f in fields(Pieces)[1:]}
    return Pieces(b.scope, **parts)


def _each(change: Callable[..., Any], *values: Any) -> Any:
    """The same tree with every column changed."""
    one = values[0]
    if isinstance(one, np.ndarray):
        return change(*values)
    if isinstance(one, dict):
        return {k: _each(change, *(v[k] for v in values)) for k in one}
    return type(one)(**{f.name: _each(change, *(getattr(v, f.name) for v in values)) for f in fields(one)})


def rank_weights(p: Pieces, slot: Slot) -> Rank:
    """The weights on a class of ranks."""
    ends = p.embedding.scaled(slot.embedding) + p.head.scaled(slot.head) + p.tied_copy.scaled(table_copies(p.scope, slot))
    mine = ends + p.mtp.scaled(slot.head)
    layer = nothing(len(p.scope))
    for name, count in slot.layers.items():
        mine = mine + p.layers[name].scaled(count)
        here = p.layers[name].scaled(np.minimum(count, 1.0))
        larger = here.everything > layer.everything
        layer = Held(**{f: np.where(larger, getattr(here, f), getattr(layer, f)) for f in here.__dataclass_fields__})
    at_end = np.where((slot.embedding > 0) | (slot.head > 0), p.largest_end, 0.0)
    return Rank(mine, ends, layer, np.maximum(p.largest_layer, at_end), slot)


def stage_activations(p: Pieces, slot: Slot) -> tuple[Column, Column, Column]:
    """(kept by one micro-batch on the rank, most that a block's backward adds to it, most that it holds when nothing else is left).

    Megatron's ``recompute_method = "block"`` recomputes the first ``recompute_num_layers`` layers of each chunk and keeps the others whole.
    """
    scope = p.scope
    chunks = np.maximum(scope.column("virtual_stages"), 1)
    recomputed = scope.option("recompute_num_layers", np.inf) * chunks if scope.options.get("recompute_method") == "block" else np.inf
    kept, adds, alone = np.zeros(len(scope)), np.zeros(len(scope)), np.zeros(len(scope))
    every = float(max(scope.structure.recompute_every, 1)) if scope.structure.recompute == "full" else 1.0
    for name, count in slot.layers.items():
        block, here = p.blocks[name], np.minimum(count, 1.0)
        if scope.structure.recompute == "full":
            these = np.minimum(count, recomputed)
            groups = np.ceil(these / every)
            span = np.minimum(every, count)
            kept = kept + groups * checkpoint_bytes(scope, block.input) + (count - these) * block.full
            working = (span - 1) * block.full + np.maximum(block.backward, block.full)
            adds = np.maximum(adds, here * (working - checkpoint_bytes(scope, block.input)))
        else:
            kept = kept + count * block.kept
            working = np.maximum(block.backward, block.full)
            adds = np.maximum(adds, here * (working - block.kept))
        alone = np.maximum(alone, here * working)
    return kept, np.maximum(adds, 0.0), alone


def checkpoint_bytes(scope: Scope, block_input: Column) -> Column:
    """What a checkpoint keeps of a block: its input; split over tensor parallelism with DeepSpeed's ``partition_activations`` or Megatron's
    ``distribute_saved_activations``.
    """
    split = scope.switch("partition_activations", False) or scope.switch("distribute_saved_activations", False)
    return block_input / scope.tp if split and not scope.structure.sequence_parallel else block_input


def happenings(p: Pieces, slot: Slot, rank: Rank) -> tuple[list[Happening], Offloaded, Column]:
    """The moments of a step on a class of ranks, in order; what offload moved away; and what one micro-batch leaves for backward."""
    scope = p.scope
    moved = offload(scope, accounts(scope, rank))
    a = moved.accounts
    kept, adds, alone = stage_activations(p, slot)
    masks, mtp = embedding_masks(scope) * slot.embedding, p.mtp_bytes * slot.head
    flying, ends = in_flight(scope, slot.rank), ends_in_flight(scope)
    layer_count = sum(slot.layers.values(), np.zeros(len(scope)))
    everything = kept * flying + masks * ends.first + mtp * ends.last
    of_others = kept * np.maximum(flying - 1, 0) + masks * (ends.first - 1) + mtp * (ends.last - 1)
    saved_all = _offloaded_activations(scope, everything, layer_count)
    gone = item("saved tensors", "activations", everything - saved_all)
    saved = item(SAVED, "activations", saved_all, "layers x saved bytes x in flight", "arXiv:2205.05198")
    head = item("saved by final norm and head", "activations", p.loss.saved * slot.head, "final norm and head input")
    others = of_others * saved_all / np.maximum(everything, 1.0)
    heads = item(
        "final norm, head and loss of other micro-batches", "logits", _other_heads(p, ends) * slot.head, "(in flight - 1) x saved bytes"
    )
    resident = (*a.parameters, *a.masters, *a.optimizer, *a.always, *_outputs_in_flight(scope, slot, flying))
    early = tuple(g.masked(np.broadcast_to(np.asarray(a.early, dtype=np.float64), (len(scope),))) for g in a.gradients)
    recomputed = item("backward of a block", "activations", adds, "recomputed tensors, gradients and temporaries of the worst row")
    last = (
        heads,
        item("saved by micro-batches still in flight", "activations", others, "(in flight - 1) x saved bytes"),
        item("backward of the last block", "activations", alone, "saved tensors, gradients and temporaries of the worst row"),
    )

    def logits(size: Column, what: str) -> Item:
        return item(f"logits and loss, {what}", "logits", size * slot.head, "bytes a logit x tokens x vocabulary share")

    found = [
        Happening("after load", "load", (*a.parameters, *a.masters)),
        Happening(
            "end of forward", "forward", (*resident, *early, saved, head, heads, logits(p.loss.forward, "forward"), *a.loss, *a.forward)
        ),
        Happening("loss backward", "backward", (*resident, *early, saved, head, heads, logits(p.loss.backward, "backward"), *a.loss)),
        Happening("first block backward", "backward", (*resident, *early, saved, heads, recomputed, *a.block)),
        Happening("end of backward", "backward", (*resident, *a.gradients, *last, *a.last)),
        Happening("optimizer step", "optimizer", (*resident, *a.gradients, *a.step)),
    ]
    moved = replace(moved, moved=(*moved.moved, gone, *paged(scope, rank)))
    return found, moved, kept + masks + mtp + p.loss.saved * slot.head + p.loss.kept * slot.head


def _other_heads(p: Pieces, ends: Ends) -> Column:
    """What the head's chunk keeps of the other micro-batches in flight: with the input gradient the loss goes, and that of the logits waits for the
    weight gradient."""
    waits = np.minimum(logits_gradient(p.scope), p.loss.kept)
    return (ends.last - 1) * p.loss.saved + (ends.loss - 1) * p.loss.kept + (ends.last - ends.loss) * waits


def _offloaded_activations(scope: Scope, saved: Column, layers: Column) -> Column:
    """activations-cpu: what is saved leaves the card; two layers' worth stays (one being copied out, one being fetched). Megatron's
    ``cpu_offloading_num_layers`` says how many layers do.
    """
    if scope.structure.offload != "activations-cpu":
        return saved
    gone = np.minimum(scope.option("cpu_offloading_num_layers", np.inf), layers)
    return saved * np.minimum(layers - gone + 2, np.maximum(layers, 1)) / np.maximum(layers, 1)


def _outputs_in_flight(scope: Scope, slot: Slot, flying: Column) -> tuple[Item, ...]:
    """What a pipeline engine keeps of the tensors between stages. Megatron frees outputs once they are sent
    (``deallocate_pipeline_outputs``); DeepSpeed
    keeps each until its gradient arrives; torch.distributed.pipelining does too, and allocates its receive buffers for all micro-batches
    at once, of each chunk.
    """
    framework = scope.structure.framework
    if framework not in ("deepspeed", "fsdp2", "ddp") or not (scope.pp > 1).any():
        return ()
    one = scope.sequence_tokens * scope.model.hidden * scope.types.stream * (scope.pp > 1)
    if framework == "deepspeed":
        source = "deepspeed/runtime/pipe/engine.py pipe_buffers"
        return (item("stage outputs in flight", "communication_buffers", one * flying, "2 N h x in flight", source),)
    source = "torch/distributed/pipelining/stage.py"
    neighbors = 2 * scope.column("virtual_stages") - slot.embedding - slot.head
    held = flying * (1 - slot.head)  # of the last chunk: what others hand on stands among what the next layer saves
    return (
        item("stage outputs in flight", "activations", one * held, "2 N h x in flight", source),
        item("receive buffers", "communication_buffers", one * scope.accumulation * neighbors, "2 N h x micro-batches x neighbors", source),
    )


def memory_rows(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> MemoryTable:
    """`MemoryTable` of the plans of one structure: the worst moment of the worst pipeline rank of each, the earlier one of equals."""
    n = len(table)
    if n > CHUNK:
        pieces_of = [table.take(np.arange(k, min(k + CHUNK, n))) for k in range(0, n, CHUNK)]
        return concatenate([memory_rows(model, cluster, job, structure, piece) for piece in pieces_of])
    owner, first, slot = classes(Scope(model, cluster, job, structure, table))
    p = shared_pieces(Scope(model, cluster, job, structure, table.take(owner)))
    found, moved, saved = happenings(p, slot, rank_weights(p, slot))
    totals = np.array([sum_of(h.items, len(owner)) for h in found])
    size = totals.max(axis=0)
    worst = np.flatnonzero(size == np.maximum.reduceat(size, first)[owner])
    worst = worst[np.searchsorted(owner[worst], np.arange(n))]
    moment = totals[:, worst].argmax(axis=0)
    parts = {part: np.zeros(n) for part in PARTS}
    for k in different(moment):
        for part, column in found[k].parts(len(owner)).items():
            parts[part] = np.where(moment == k, column[worst], parts[part])
    phases = {name: np.max([t for t, h in zip(totals, found) if h.phase == name], axis=0) for name in PHASES}
    a = moved.accounts
    owned = {"parameters": a.parameters, "master_weights": a.masters, "gradients": a.gradients, "optimizer": a.optimizer}
    return MemoryTable.build(
        n,
        {part: whole(column) for part, column in parts.items()},
        {part: whole(sum_of(items, len(owner))[worst]) for part, items in owned.items()},
        whole(saved[worst]),
        {phase: whole(column[worst]) for phase, column in phases.items()},
        detail=LedgerDetail(model, cluster, job, structure, table, replay),
        peak_phase=PHASE_OF_MOMENT[moment],
        peak_moment=moment,
        moments=MOMENTS,
        pipeline_rank=slot.rank[worst],
        extra={
            "offloaded_bytes": whole(np.maximum.reduceat(sum_of(moved.moved, len(owner)), first)),
            "pooled_bytes": whole(np.maximum.reduceat(pooled(p, slot, found, moved), first)),
        },
    )


def pooled(p: Pieces, slot: Slot, found: list[Happening], moved: Offloaded) -> Column:
    """What the allocator has taken from the device after a step when no pool serves another: each pool's own largest moment, and
    leftovers.
    """
    n = len(p.scope)
    held_at = [h.pools(n) for h in found]
    largest = add_up((np.maximum.reduce([at[pool] for at in held_at]) for pool in POOLS), n)
    return np.asarray(largest + sum_of(moved.accounts.leftovers, n) + np.rint(p.loss.stale * slot.head))


def saved_by_layer(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> Column:
    """[kinds, plans] bytes that the forward pass of one micro-batch leaves for backward in a layer (in `recompute_every` of them with full recomputation), for
    each of `ModelSpec.counts`."""
    scope = Scope(model, cluster, job, structure, table)
    whole = structure.recompute == "full"
    kept = [block_input_bytes(b, scope) if whole else block_kept(b, scope) for b, _ in model.counts]
    return np.array([checkpoint_bytes(scope, k) if whole else k for k in kept])


def whole(column: Column) -> IntColumn:
    return np.rint(column).astype(np.int64)


def replay(scope: Scope) -> list[tuple[Slot, list[Happening]]]:
    """Each class of ranks of one plan with its moments, for `LedgerDetail`."""
    p = pieces(scope)
    return [(slot, happenings(p, slot, rank_weights(p, slot))[0]) for slot in slots(scope)]
