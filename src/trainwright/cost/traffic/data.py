"""Data parallelism: gradients averaged, shards gathered and scattered, by framework.

Units of P bytes (one copy of the parameters) that a ring moves a rank and step, in the limit of many ranks (arXiv:1910.02054 section 7):
all-reduce 2; ZeRO-1 and 2 reduce-scatter + all-gather 2; ZeRO-3 all-gather twice + reduce-scatter 3.
"""

from __future__ import annotations

import numpy as np

from ...spec.blocks import Block, Weight
from ...spec.precision import DTYPE_BYTES
from ..message import Axis, Phase
from ..table import IntColumn
from .columns import Case, ceil_div

MIB = 2**20
DDP_BUCKET_BYTES = 25 * MIB  # torch/nn/parallel/distributed.py: bucket_cap_mb
DEEPSPEED_BUCKET = 5 * 10**8  # elements: reduce_bucket_size, allgather_bucket_size
DEEPSPEED_PREFETCH_REUSE = 10**9  # elements: stage3_max_reuse_distance, stage3_max_live_parameters
DEEPSPEED_PERSISTENT = 10**5  # elements: stage3_param_persistence_threshold
MEGATRON_BUCKET = 4 * 10**7  # elements: max(40M, 1M x dp), megatron/core/distributed


def data_parallel(case: Case) -> None:
    """Every message of the data axes, by the framework's own way."""
    framework, sharding = case.structure.framework, case.structure.sharding
    if framework == "fsdp2":
        _fsdp2(case)
    elif framework == "fsdp1" and sharding != "none":
        _fsdp1(case)
    elif framework == "megatron":
        _megatron(case)
    elif framework == "deepspeed":
        _deepspeed_zero3(case) if sharding == "zero3" else _deepspeed(case)
    else:
        _ddp(case)


def _in_buckets(
    case: Case,
    axis: Axis,
    collective: str,
    phase: Phase,
    total: IntColumn,
    bucket: IntColumn | int,
    calls: IntColumn | int,
    ranks: IntColumn,
    stride: IntColumn | int,
    overlaps: str,
    what: str,
) -> None:
    """`total` bytes as full buckets and a rest, so that the sum is exact."""
    full, rest = np.divmod(total, np.maximum(np.asarray(bucket, dtype=np.int64), 1))
    case.add(axis, collective, phase, bucket, full * calls, ranks, stride, overlaps=overlaps, what=what)
    case.add(axis, collective, phase, rest, calls, ranks, stride, overlaps=overlaps, what=f"{what}, the rest")


# --- PyTorch DDP, alone or with ZeroRedundancyOptimizer -------------------------------------------------------------------------


def _ddp(case: Case) -> None:
    """Buckets of 25 MiB in the stored type, once a step (no_sync before); ZeRO-1 then broadcasts every tensor from its owner."""
    total = case.total(case.trainable, experts=False) + case.total(case.trainable, experts=True)
    bucket = int(float(case.option("bucket_cap_mb", DDP_BUCKET_BYTES // MIB)) * MIB)
    size = case.stored_bytes
    _in_buckets(case, "dp", "all_reduce", "reduce", total * size, bucket, 1, case.data, case.tp, "backward", "gradient buckets")
    if case.structure.sharding != "zero1":
        return
    for block, count in case.stage.blocks(case.model):
        for w in case.weights(block):
            what = f"updated tensors of {' x '.join(str(d) for d in w.shape)}"
            case.add("dp", "broadcast", "optimizer", case.local_elements(w) * size, count, case.data, case.tp, what=what)


# --- PyTorch FSDP2 --------------------------------------------------------------------------------------------------------------


def _padded(case: Case, weights: tuple[Weight, ...], experts: bool, shard: IntColumn) -> IntColumn:
    """Elements of a group as FSDP2 moves it: every tensor cut on its first dimension and padded to whole rows a rank."""
    total = np.zeros(len(case.table), dtype=np.int64)
    for w in weights:
        if case.is_expert(w) == experts:
            rows, *rest = case.local_shape(w)
            total = total + ceil_div(rows, shard) * shard * np.multiply.reduce([np.ones_like(rows), *rest])
    return total


def _fsdp2(case: Case) -> None:
    replicate = case.structure.sharding == "none"
    for experts in (False, True):
        whole = case.expert_shard if experts else case.shard
        stride = case.expert_stride if experts else case.tp
        shard = np.ones_like(whole) if replicate else whole
        across = whole * case.table.dp_replicate if replicate else case.table.dp_replicate
        outer_stride = stride if replicate else stride * whole
        for layer, count, blocks in _groups(case):
            everything = sum((_padded(case, case.weights(b), experts, shard) for b in blocks), np.zeros_like(shard))
            wanted = sum((_padded(case, case.trainable(b), experts, shard) for b in blocks), np.zeros_like(shard))
            if not layer:
                everything = everything + _tied_rows(case, experts, shard)
                wanted = wanted + (0 if case.lora else _tied_rows(case, experts, shard))
            name = ("experts of a layer" if experts else "a layer") if layer else "embedding, final norm, head"
            _gather(case, everything, count, layer, shard, stride, f"parameters of {name}")
            size = wanted * case.gradient_bytes
            case.add(
                "dp_shard",
                "reduce_scatter",
                "reduce",
                size,
                count,
                shard,
                stride,
                overlaps="backward" if layer else "",
                what=f"gradients of {name}",
            )
            axis: Axis = "dp" if replicate else "dp_replicate"
            what = f"gradients of {name}" if replicate else f"gradient shards of {name}"
            case.add(
                axis, "all_reduce", "reduce", size // shard, count, across, outer_stride, overlaps="backward" if layer else "", what=what
            )


def _groups(case: Case) -> list[tuple[bool, IntColumn, tuple[Block, ...]]]:
    """(is a layer, how many on this rank, its blocks): one group a layer, one for what is left at the ends."""
    model, stage = case.model, case.stage
    groups: list[tuple[bool, IntColumn, tuple[Block, ...]]] = [(True, count, (model.blocks[name],)) for name, count in stage.layers.items()]
    groups += [(True, stage.head, (block,)) for block in model.mtp]
    both = stage.embedding * stage.head
    groups.append((False, both, (model.embedding, model.head)))
    groups.append((False, stage.embedding - both, (model.embedding,)))
    groups.append((False, stage.head - both, (model.head,)))
    return groups


def _tied_rows(case: Case, experts: bool, shard: IntColumn) -> IntColumn:
    """A tied table on a rank that has the head alone."""
    copy = case.tied_copy(case.weights)
    return np.zeros_like(shard) if experts else copy


def _gather(case: Case, elements: IntColumn, count: IntColumn, layer: bool, shard: IntColumn, stride: IntColumn, what: str) -> None:
    """All-gathers of a group: forward, and backward where it was given back in between.

    A pipeline stage keeps its parameters between micro-batches after the first backward (torch/distributed/pipelining/stage.py switches
    reshard_after_backward off until the last), so ZeRO-2 gathers once and ZeRO-3 forward only while no backward came before.
    """
    size = elements * _gathered_bytes(case)
    micro = case.micro_batches
    again = case.structure.sharding == "zero3" and (layer or case.structure.reshard_root)
    forward = np.where(case.table.pp == 1, micro, np.minimum(micro, case.table.pp - case.stage.rank) if again else 1)
    case.add("dp_shard", "all_gather", "forward", size, count * forward, shard, stride, overlaps="layer" if layer else "", what=what)
    if again:
        case.add("dp_shard", "all_gather", "backward", size, count * micro, shard, stride, overlaps="layer", what=what)


def _gathered_bytes(case: Case) -> int:
    """Bytes an element of a gathered parameter: the compute type, the stored type under autocast, one byte with fp8 parameters."""
    if case.structure.fp8_params:
        return 1
    return case.stored_bytes if case.job.autocast else case.activation_bytes


# --- PyTorch FSDP1 --------------------------------------------------------------------------------------------------------------


def _fsdp1(case: Case) -> None:
    """One flat parameter a layer, padded to the ranks. The root is kept after forward; gradients are reduced every micro-batch (no_sync
    would hold whole gradients), unless the option ``no_sync`` says otherwise."""
    micro = case.micro_batches
    reductions = 1 if case.option("no_sync", False) else micro
    shard, stride = case.shard, case.tp
    base = DTYPE_BYTES[case.job.base_quantization] if case.job.method == "qlora" and case.job.base_quantization else None
    for layer, count, blocks in _groups(case):
        weights = sum((case.weights(b) for b in blocks), ())
        wanted = sum((case.trainable(b) for b in blocks), ())
        frozen = sum((case.local_elements(w) for w in weights if case.lora and w not in wanted), np.zeros_like(shard))
        elements = _flat(case, weights) + (0 if layer else case.tied_copy(case.weights))
        name = "a layer" if layer else "embedding, final norm, head"
        size = ceil_div(elements, shard) * shard * _gathered_bytes(case)
        if base is not None and layer:
            size = size - (frozen * (_gathered_bytes(case) - base)).astype(np.int64)
        case.add(
            "dp_shard",
            "all_gather",
            "forward",
            size,
            count * micro,
            shard,
            stride,
            overlaps="layer" if layer else "",
            what=f"parameters of {name}",
        )
        if layer and case.structure.sharding == "zero3":
            case.add(
                "dp_shard", "all_gather", "backward", size, count * micro, shard, stride, overlaps="layer", what=f"parameters of {name}"
            )
        gradient = ceil_div(_flat(case, wanted), shard) * shard * case.gradient_bytes
        overlaps = "backward" if layer else ""
        case.add(
            "dp_shard",
            "reduce_scatter",
            "reduce",
            gradient,
            count * reductions,
            shard,
            stride,
            overlaps=overlaps,
            what=f"gradients of {name}",
        )
        across = case.table.dp_replicate
        case.add(
            "dp_replicate",
            "all_reduce",
            "reduce",
            gradient // shard,
            count * reductions,
            across,
            case.replicate_stride,
            overlaps=overlaps,
            what=f"gradient shards of {name}",
        )


def _flat(case: Case, weights: tuple[Weight, ...]) -> IntColumn:
    return sum((case.local_elements(w) for w in weights), np.zeros(len(case.table), dtype=np.int64))


# --- Megatron-Core --------------------------------------------------------------------------------------------------------------


def _megatron(case: Case) -> None:
    """A contiguous gradient buffer in buckets: all-reduced, or with the distributed optimizer scattered in the gradient's type and
    gathered in the parameters'. Experts have a buffer and a group of their own. Tied tables on both ends of a pipeline are summed between
    them."""
    hides = bool(case.option("overlap_grad_reduce", (case.structure.framework_date or "2024-01") >= "2023-06"))
    gathers = bool(case.option("overlap_param_gather", hides))
    parameter = 1 if case.structure.fp8_params else case.activation_bytes
    for experts in (False, True):
        what = "expert " if experts else ""
        elements = case.total(case.trainable, experts)
        shard = case.expert_shard if experts else case.shard
        stride = case.expert_stride if experts else case.tp
        everyone = case.expert_data if experts else case.data
        bucket = np.maximum(MEGATRON_BUCKET, 10**6 * everyone) if hides else np.maximum(elements, 1)
        overlap = "backward" if hides else ""
        if case.structure.sharding == "none":
            _reduce(case, "dp", "all_reduce", elements, bucket, everyone, stride, overlap, f"{what}gradients")
            continue
        _reduce(case, "dp_shard", "reduce_scatter", elements, bucket, shard, stride, overlap, f"{what}gradients")
        shards = ceil_div(elements, shard)
        _reduce(
            case,
            "dp_replicate",
            "all_reduce",
            shards,
            ceil_div(bucket, shard),
            case.table.dp_replicate,
            stride * shard,
            overlap,
            f"{what}gradient shards",
        )
        _in_buckets(
            case,
            "dp_shard",
            "all_gather",
            "optimizer",
            elements * parameter,
            bucket * parameter,
            1,
            shard,
            stride,
            "layer" if gathers else "",
            f"updated {what}parameters",
        )
    _tied_embedding(case)


def _reduce(
    case: Case,
    axis: Axis,
    collective: str,
    elements: IntColumn,
    bucket: IntColumn,
    ranks: IntColumn,
    stride: IntColumn,
    overlaps: str,
    what: str,
) -> None:
    size = case.gradient_bytes
    _in_buckets(case, axis, collective, "reduce", elements * size, bucket * size, 1, ranks, stride, overlaps, what)


def _tied_embedding(case: Case) -> None:
    """First and last stage sum the gradients of the table that both hold."""
    if not case.model.tied or case.lora:
        return
    one_end = np.where(case.stage.embedding + case.stage.head == 1, 1, 0)
    table = case.model.embedding.weights[0]
    ranks = np.where(case.table.pp > 1, 2, 1)
    distance = (case.table.pp - 1) * case.pipeline_stride
    size = case.local_elements(table) * case.gradient_bytes
    case.add("pp", "all_reduce", "reduce", size, one_end, ranks, np.maximum(distance, 1), what="tied embedding of first and last stage")


# --- DeepSpeed ------------------------------------------------------------------------------------------------------------------


def _deepspeed(case: Case) -> None:
    """ZeRO 0 to 2. ``allreduce_and_scatter`` (the default, reduce_scatter: true) all-reduces whole buckets and keeps the own part, so
    stages 1 and 2 send as much as plain data parallelism and gather the updated parameters on top; stage 2 reduces every micro-batch."""
    sharding = case.structure.sharding
    hides = bool(case.option("overlap_comm", False))
    bucket = int(case.option("reduce_bucket_size", DEEPSPEED_BUCKET))
    gather = int(case.option("allgather_bucket_size", DEEPSPEED_BUCKET))
    times = case.micro_batches if sharding == "zero2" else np.ones_like(case.tp)
    for experts in (False, True):
        what = "expert " if experts else ""
        elements = case.total(case.trainable, experts)
        everyone = case.expert_data if experts else case.data
        stride = case.expert_stride if experts else case.tp
        size = case.gradient_bytes
        overlap = "backward" if hides else ""
        _in_buckets(
            case, "dp", "all_reduce", "reduce", elements * size, bucket * size, times, everyone, stride, overlap, f"{what}gradients"
        )
        if sharding != "none":
            shard = case.expert_shard if experts else case.shard
            c = case.activation_bytes
            _in_buckets(
                case, "dp_shard", "all_gather", "optimizer", elements * c, gather * c, 1, shard, stride, "", f"updated {what}parameters"
            )
    _tied_embedding(case)


def _deepspeed_zero3(case: Case) -> None:
    """Parameters are cut flat, each padded to the ranks; small ones stay whole and are gathered once a step. Forward and backward gather,
    but what is used again within `stage3_max_reuse_distance` elements is kept: the layers nearest the loss."""
    keep_below = int(case.option("stage3_param_persistence_threshold", DEEPSPEED_PERSISTENT))
    reuse = int(case.option("stage3_max_reuse_distance", DEEPSPEED_PREFETCH_REUSE))
    live = int(case.option("stage3_max_live_parameters", DEEPSPEED_PREFETCH_REUSE))
    hides = bool(case.option("overlap_comm", True))
    kept_elements = min(reuse // 2, live)
    micro = case.micro_batches
    for experts in (False, True):
        shard = case.expert_shard if experts else case.shard
        stride = case.expert_stride if experts else case.tp
        small = np.zeros_like(shard)
        for layer, count, blocks in _groups(case):
            name = ("experts of a layer" if experts else "a layer") if layer else "embedding, final norm, head"
            mine = [w for b in blocks for w in case.weights(b) if case.is_expert(w) == experts]
            large, below = _cut_flat(case, mine, shard, keep_below)
            small = small + count * below
            kept = np.minimum(count, kept_elements // np.maximum(large, 1)) if layer else np.zeros_like(count)
            size = large * _gathered_bytes(case)
            hidden = "layer" if hides and layer else ""
            case.add("dp_shard", "all_gather", "forward", size, count * micro, shard, stride, overlaps=hidden, what=f"parameters of {name}")
            case.add(
                "dp_shard",
                "all_gather",
                "backward",
                size,
                (count - kept) * micro,
                shard,
                stride,
                overlaps=hidden,
                what=f"parameters of {name}",
            )
            wanted = [w for b in blocks for w in case.trainable(b) if case.is_expert(w) == experts]
            gradient = _cut_flat(case, wanted, shard, 0)[0] * case.gradient_bytes
            overlaps = "backward" if hides else ""
            case.add(
                "dp_shard",
                "reduce_scatter",
                "reduce",
                gradient,
                count * micro,
                shard,
                stride,
                overlaps=overlaps,
                what=f"gradients of {name}",
            )
        case.add(
            "dp_shard", "all_gather", "optimizer", small * case.activation_bytes, 1, shard, stride, what="small parameters that stay whole"
        )


def _cut_flat(case: Case, weights: list[Weight], shard: IntColumn, keep_below: int) -> tuple[IntColumn, IntColumn]:
    """Elements of tensors that are cut (padded to the ranks) and of those that stay whole."""
    cut, whole = np.zeros_like(shard), np.zeros_like(shard)
    for w in weights:
        elements = case.local_elements(w)
        small = elements < keep_below
        cut = cut + np.where(small, 0, ceil_div(elements, shard) * shard)
        whole = whole + np.where(small, elements, 0)
    return cut, whole
