"""Data parallelism: gradients averaged, shards gathered and scattered, by framework.

Units of P bytes (one copy of the parameters) that a ring moves a rank and step, in the limit of many ranks (arXiv:1910.02054 section 7):
all-reduce 2; ZeRO-1 and 2 reduce-scatter + all-gather 2; ZeRO-3 all-gather twice + reduce-scatter 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...frameworks import FRAMEWORKS
from ...schedules import SCHEDULES
from ...spec.blocks import Block, Weight
from ...spec.precision import DTYPE_BYTES
from ..message import Axis
from ..table import IntColumn
from .buckets import add_filled
from .buffers import deepspeed, deepspeed_zero3, megatron, tied_embedding
from .columns import Case, ceil_div
from .groups import gathered_bytes, groups


def data_parallel(case: Case) -> None:
    """Every message of the data axes, by the framework's own way."""
    framework, sharding = case.structure.framework, case.structure.sharding
    if framework == "fsdp2":
        _fsdp2(case)
    elif framework == "fsdp1":
        _fsdp1(case)
    elif framework == "megatron":
        megatron(case)
    elif framework == "deepspeed":
        deepspeed_zero3(case) if sharding == "zero3" else deepspeed(case)
    else:
        _ddp(case)
    if framework in ("fsdp2", "fsdp1", "ddp"):
        _held_twice(case)
        _whole_matrices(case)


def _whole_matrices(case: Case) -> None:
    """Muon's iteration wants whole gradients of the layers' matrices: what is cut is gathered, rows over both axes from the data's side, columns
    from the tensor's; of stacks of experts those that FSDP2 cuts within."""
    if case.job.optimizer != "muon":
        return
    sharded = case.structure.framework != "ddp" and case.structure.sharding != "none"
    shard = case.shard if sharded else np.ones_like(case.tp)
    for name, count in case.stage.layers.items():
        what = "gradients of matrices for Muon"
        for w in (w for w in case.trainable(case.model.blocks[name]) if len(w.shape) > 2 and sharded):
            cut, stride = (case.expert_shard, case.expert_stride) if case.is_expert(w) else (shard, case.tp)
            size = case.local_elements(w) * case.stored_bytes
            case.add("dp_shard", "all_gather", "optimizer", size, count * _within(case.local_shape(w), cut), cut, stride, what=what)
        for w in (w for w in case.trainable(case.model.blocks[name]) if len(w.shape) == 2):
            local = _padded(case, (w,), False, shard) * case.stored_bytes
            outer, inner = (local * case.tp, local // shard * case.tp) if w.tp_dim else (local, local * case.tp)
            case.add("dp_shard", "all_gather", "optimizer", outer, count, shard, case.tp, what=what)
            if w.tp_dim is not None:
                case.add("tp", "all_gather", "optimizer", inner, count, case.tp, 1, what=what)


def _held_twice(case: Case) -> None:
    """What two ranks of a pipeline hold: a tied table at its ends, all stages of a schedule that enters at both. Their gradients, which are cut by
    then, are summed in the stored type once a step."""
    sharded = case.structure.framework != "ddp" and case.structure.sharding != "none"
    shard = case.shard if sharded else np.ones_like(case.tp)
    tied_embedding(case, _padded(case, case.model.embedding.weights[:1], False, shard) // shard * case.stored_bytes)
    if SCHEDULES[case.structure.schedule].placement != "bidirectional":
        return
    expert_shard = case.expert_shard if sharded else shard

    def held(w: Weight) -> IntColumn:
        cut = expert_shard if case.is_expert(w) else shard
        return np.asarray(_padded(case, (w,), None, cut) // cut)

    pair = np.where(case.table.pp > 1, 2, 1)
    distance = np.abs(case.table.pp - 1 - 2 * case.stage.rank) * case.pipeline_stride
    add_filled(case, "pp", "reduce", held, pair, distance, "", "gradients of both directions", apart=False)


# --- PyTorch DDP, alone or with ZeroRedundancyOptimizer -------------------------------------------------------------------------


def _ddp(case: Case) -> None:
    """Buckets of each chunk in the stored type, once a step (no_sync before), experts that are spread apart from the rest; ZeRO-1 then broadcasts every
    tensor, as its owner has stepped it."""

    def alike(w: Weight) -> IntColumn:
        return np.asarray(case.local_elements(w) * ~(case.apart & case.is_expert(w)))

    def spread(w: Weight) -> IntColumn:
        return np.asarray(case.local_elements(w) * (case.apart & case.is_expert(w)))

    add_filled(case, "dp", "reduce", alike, case.data, case.tp, "backward", "gradient buckets", apart=True)
    expert = ("backward", "expert gradient buckets")
    add_filled(case, "dp", "reduce", spread, case.expert_data, case.expert_stride, *expert, apart=True)
    if case.structure.sharding != "zero1":
        return
    size = case.types.stepped
    for block, count in case.stage.blocks(case.model):
        for w in case.trainable(block):
            what = f"updated tensors of {' x '.join(str(d) for d in w.shape)}"
            case.add("dp", "broadcast", "optimizer", case.local_elements(w) * size, count, case.data, case.tp, what=what)
    copy = case.tied_copy(case.trainable) * size
    case.add("dp", "broadcast", "optimizer", copy, 1, case.data, case.tp, what="updated copy of a tied table")


# --- PyTorch FSDP2 --------------------------------------------------------------------------------------------------------------


def _padded(case: Case, weights: tuple[Weight, ...], experts: bool | None, shard: IntColumn) -> IntColumn:
    """Elements of a group as FSDP2 moves it: every tensor cut on its first dimension and padded to whole rows a rank, a stack of fewer experts than shards
    on a later one that divides. Of the experts, of the others, of both (None)."""
    total = np.zeros(len(case.table), dtype=np.int64)
    for w in weights:
        if experts is None or case.is_expert(w) == experts:
            rows, *rest = case.local_shape(w)
            whole = np.where(_within([rows, *rest], shard), rows, ceil_div(rows, shard) * shard)
            total = total + whole * np.multiply.reduce([np.ones_like(rows), *rest])
    return total


def _within(dims: list[IntColumn], shard: IntColumn) -> NDArray[np.bool_]:
    """Whether FSDP2 cuts a tensor of those local dimensions on a later one."""
    rows, *rest = dims
    return (rows < shard) & np.any([d % shard == 0 for d in rest], axis=0) if len(rest) > 1 else np.zeros(len(rows), dtype=bool)


def _fsdp2(case: Case) -> None:
    replicate = case.structure.sharding == "none"
    for experts in (None, False, True):
        rows = case.apart if experts is not None else ~case.apart
        if not rows.any():
            continue
        whole = case.expert_shard if experts else case.shard
        stride = case.expert_stride if experts else case.tp
        shard = np.ones_like(whole) if replicate else whole
        across = (case.expert_data if experts else case.data) // shard
        outer_stride = stride if replicate else stride * whole
        for layer, count, blocks in groups(case):
            everything = sum((_padded(case, case.weights(b), experts, shard) for b in blocks), np.zeros_like(shard))
            wanted = sum((_padded(case, case.trainable(b), experts, shard) for b in blocks), np.zeros_like(shard))
            count = np.where(rows, count, 0)
            if any(b is case.model.head for b in blocks) and not experts:
                copy = case.tied_copy(case.weights)
                everything = everything + copy
                wanted = wanted + (0 if case.lora else copy)
            name = ("experts of a layer" if experts else "a layer") if layer else "embedding, final norm, head"
            _gather(case, everything, count, layer, shard, stride, f"parameters of {name}")
            size = wanted * case.gradient_bytes
            reductions = count * case.reductions
            case.add(
                "dp_shard",
                "reduce_scatter",
                "reduce",
                size,
                reductions,
                shard,
                stride,
                overlaps="backward" if layer else "",
                what=f"gradients of {name}",
            )
            axis: Axis = "dp" if replicate else "dp_replicate"
            what = f"gradients of {name}" if replicate else f"gradient shards of {name}"
            case.add(
                axis,
                "all_reduce",
                "reduce",
                size // shard,
                reductions,
                across,
                outer_stride,
                overlaps="backward" if layer else "",
                what=what,
            )


def _gather(case: Case, elements: IntColumn, count: IntColumn, layer: bool, shard: IntColumn, stride: IntColumn, what: str) -> None:
    """All-gathers of a group: forward, and backward where it was given back in between.

    A pipeline stage does not reshard after the backward of a micro-batch but the last (torch/distributed/pipelining/stage.py), so ZeRO-2
    gathers once. With ZeRO-3 the w forwards before the first backward gather, each later one finds what a backward left, and every
    backward that follows a forward gathers: w + 1 + (m - w) = m + 1 in all, as counted under a fake process group (torch 2.13, 1F1B and
    GPipe, 4 stages).
    """
    size = elements * gathered_bytes(case)
    micro = case.micro_batches
    again = case.structure.sharding == "zero3" and (layer or case.structure.reshard_root)
    ahead = np.minimum(micro, micro if case.structure.schedule == "gpipe" else case.table.pp - case.stage.rank)
    forward = np.where(case.table.pp == 1, micro, ahead if again else 1)
    case.add("dp_shard", "all_gather", "forward", size, count * forward, shard, stride, overlaps="layer" if layer else "", what=what)
    if again:
        backward = np.where(case.table.pp == 1, micro, micro + 1 - ahead)
        case.add("dp_shard", "all_gather", "backward", size, count * backward, shard, stride, overlaps="layer", what=what)


# --- PyTorch FSDP1 --------------------------------------------------------------------------------------------------------------


def _fsdp1(case: Case) -> None:
    """One flat parameter a layer, padded to the ranks; the root is kept after forward. Gradients are reduced every micro-batch, or held whole
    instead (`MemoryRules.puts_off`), which keeps the parameters of ZeRO-2 as well. Without sharding each flat parameter is all-reduced."""
    quiet = FRAMEWORKS["fsdp1"].memory.puts_off(case.model.family, case.structure)
    micro = case.micro_batches
    sharding = case.structure.sharding
    shard = case.shard if sharding != "none" else np.ones_like(case.shard)
    across = case.table.dp_replicate if sharding != "none" else case.data
    gathers = np.ones_like(micro) if quiet and sharding == "zero2" else micro
    for layer, count, blocks in groups(case):
        name = "a layer" if layer else "embedding, final norm, head"
        size = _flat_bytes(case, layer, blocks, shard)
        what = f"parameters of {name}"
        ahead = "layer" if layer else ""
        case.add("dp_shard", "all_gather", "forward", size, count * gathers, shard, case.tp, overlaps=ahead, what=what)
        if layer and sharding == "zero3":
            case.add("dp_shard", "all_gather", "backward", size, count * micro, shard, case.tp, overlaps=ahead, what=what)
        wanted = _flat(case, sum((case.trainable(b) for b in blocks), ()))
        gradient = ceil_div(wanted, shard) * shard * case.gradient_bytes
        times = count if quiet else count * micro
        behind = "backward" if layer else ""
        what = f"gradients of {name}"
        case.add("dp_shard", "reduce_scatter", "reduce", gradient, times, shard, case.tp, overlaps=behind, what=what)
        axis: Axis = "dp" if sharding == "none" else "dp_replicate"
        case.add(axis, "all_reduce", "reduce", gradient // shard, times, across, case.tp * shard, overlaps=behind, what=what)


def _flat_bytes(case: Case, layer: bool, blocks: tuple[Block, ...], shard: IntColumn) -> IntColumn:
    """Gathered bytes of a flat parameter; the frozen base of QLoRA travels in its own format."""
    weights = sum((case.weights(b) for b in blocks), ())
    elements = _flat(case, weights) + (case.tied_copy(case.weights) if any(b is case.model.head for b in blocks) else 0)
    size = ceil_div(elements, shard) * shard * gathered_bytes(case)
    if layer and case.job.method == "qlora" and case.job.base_quantization:
        trained = sum((case.trainable(b) for b in blocks), ())
        frozen = _flat(case, tuple(w for w in weights if w not in trained))
        size = size - (frozen * (gathered_bytes(case) - DTYPE_BYTES[case.job.base_quantization])).astype(np.int64)
    return size


def _flat(case: Case, weights: tuple[Weight, ...]) -> IntColumn:
    return sum((case.local_elements(w) for w in weights), np.zeros(len(case.table), dtype=np.int64))
