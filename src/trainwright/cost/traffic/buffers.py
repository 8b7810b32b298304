"""Gradients in contiguous buffers and buckets: Megatron-Core and DeepSpeed."""

from __future__ import annotations

import numpy as np

from ...spec.blocks import Weight
from ..message import Axis
from ..table import IntColumn
from .columns import Case, ceil_div
from .groups import gathered_bytes, groups

DEEPSPEED_BUCKET = 5 * 10**8  # elements: reduce_bucket_size, allgather_bucket_size
DEEPSPEED_PREFETCH_REUSE = 10**9  # elements: stage3_max_reuse_distance, stage3_max_live_parameters
DEEPSPEED_PERSISTENT = 10**5  # elements: stage3_param_persistence_threshold
MEGATRON_BUCKET = 4 * 10**7  # elements: max(40M, 1M x dp), megatron/core/distributed


# --- Megatron-Core --------------------------------------------------------------------------------------------------------------


def megatron(case: Case) -> None:
    """A contiguous gradient buffer in buckets: all-reduced, or with the distributed optimizer scattered in the gradient's type and
    gathered in the parameters'. Experts have a buffer and a group of their own. Tied tables on both ends of a pipeline are summed between
    them."""
    hides = case.switch("overlap_grad_reduce", (case.structure.framework_date or "2024-01") >= "2023-06")
    gathers = case.switch("overlap_param_gather", hides)
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
        case.add_in_buckets(
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
    tied_embedding(case, case.local_elements(case.model.embedding.weights[0]) * case.gradient_bytes)


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
    case.add_in_buckets(axis, collective, "reduce", elements * size, bucket * size, 1, ranks, stride, overlaps, what)


def tied_embedding(case: Case, size: IntColumn) -> None:
    """First and last stage sum the gradients of the table that both hold, of `size` bytes a rank."""
    if not case.model.tied or case.lora:
        return
    one_end = np.where(case.stage.embedding + case.stage.head == 1, 1, 0)
    ranks = np.where(case.table.pp > 1, 2, 1)
    distance = (case.table.pp - 1) * case.pipeline_stride
    case.add("pp", "all_reduce", "reduce", size, one_end, ranks, np.maximum(distance, 1), what="tied embedding of first and last stage")


# --- DeepSpeed ------------------------------------------------------------------------------------------------------------------


def deepspeed(case: Case) -> None:
    """ZeRO 0 to 2. ``allreduce_and_scatter`` (the default, reduce_scatter: true) all-reduces whole buckets and keeps the own part, so
    stages 1 and 2 send as much as plain data parallelism and gather the updated parameters on top; stage 2 reduces every micro-batch."""
    sharding = case.structure.sharding
    hides = case.switch("overlap_comm", False)
    bucket = case.number("reduce_bucket_size", DEEPSPEED_BUCKET, 1)
    gather = case.number("allgather_bucket_size", DEEPSPEED_BUCKET, 1)
    scatters = sharding != "none" and not case.switch("use_multi_rank_bucket_allreduce", True)
    times = case.micro_batches if sharding == "zero2" else np.ones_like(case.tp)
    collective = "reduce_scatter" if scatters else "all_reduce"
    for experts in (False, True):
        what = "expert " if experts else ""
        elements = case.total(case.trainable, experts)
        everyone = case.expert_data if experts else case.data
        stride = case.expert_stride if experts else case.tp
        size = case.gradient_bytes
        overlap = "backward" if hides else ""
        case.add_in_buckets(
            "dp", collective, "reduce", elements * size, bucket * size, times, everyone, stride, overlap, f"{what}gradients"
        )
        if sharding != "none":
            shard = case.expert_shard if experts else case.shard
            c = case.activation_bytes
            case.add_in_buckets(
                "dp_shard", "all_gather", "optimizer", elements * c, gather * c, 1, shard, stride, "", f"updated {what}parameters"
            )
    tied_embedding(case, case.local_elements(case.model.embedding.weights[0]) * case.gradient_bytes)


def deepspeed_zero3(case: Case) -> None:
    """Parameters are cut flat, each padded to the ranks; small ones stay whole and are gathered once a step. Forward and backward gather,
    but what is used again within `stage3_max_reuse_distance` elements is kept: the layers nearest the loss."""
    keep_below = case.number("stage3_param_persistence_threshold", DEEPSPEED_PERSISTENT)
    reuse = case.number("stage3_max_reuse_distance", DEEPSPEED_PREFETCH_REUSE)
    live = case.number("stage3_max_live_parameters", DEEPSPEED_PREFETCH_REUSE)
    hides = case.switch("overlap_comm", True)
    kept_elements = min(reuse // 2, live)
    micro = case.micro_batches
    for experts in (False, True):
        shard = case.expert_shard if experts else case.shard
        stride = case.expert_stride if experts else case.tp
        small = np.zeros_like(shard)
        for layer, count, blocks in groups(case):
            name = ("experts of a layer" if experts else "a layer") if layer else "embedding, final norm, head"
            mine = [w for b in blocks for w in case.weights(b) if case.is_expert(w) == experts]
            large, below = _cut_flat(case, mine, shard, keep_below)
            small = small + count * below
            kept = np.minimum(count, kept_elements // np.maximum(large, 1)) if layer else np.zeros_like(count)
            size = large * gathered_bytes(case)
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
