"""What each framework holds of weights, gradients and optimizer states, in which type, and which buffers it needs at which moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..table import Column
from .items import Accounts, Item, item
from .ranks import Slot
from .scope import Scope, ceil_div
from .weights import Held, dealt, local_elements, optimizer_of, quantized_bytes, state_bytes


@dataclass(frozen=True)
class Rank:
    """Weights of one class of pipeline ranks. `root`: embedding, final norm and head; `layer`: the largest layer; `largest`: the largest
    tensor
    (elements on this rank, before data-parallel sharding); `slot`: what stands there.
    """

    held: Held
    root: Held
    layer: Held
    largest: Column
    slot: Slot


def sharded(scope: Scope, rank: Rank) -> Column:
    """Trained elements of a rank after the optimizer's split; of ZeroRedundancyOptimizer, which deals whole tensors, what rank 0 gets."""
    if (scope.structure.framework, scope.structure.sharding) == ("ddp", "zero1"):
        return dealt(scope, rank.slot)
    return rank.held.trained / scope.shards + rank.held.trained_expert / scope.expert_shards


def sharded_frozen(scope: Scope, held: Held) -> Column:
    return held.frozen / scope.shards


def optimizer_items(scope: Scope, rank: Rank, elements: Column, stored: Column | float, source: str) -> tuple[Item, ...]:
    kind = optimizer_of(scope)
    size = state_bytes(kind, elements, rank.held, stored)
    return (
        item(
            f"{kind.name} states",
            "optimizer",
            size,
            f"states of {kind.name} x trained parameters of the rank's share",
            kind.source or source,
        ),
    )


def _masters(scope: Scope, elements: Column, source: str) -> tuple[Item, ...]:
    if not scope.masters:
        return ()
    return (item("fp32 master weights", "master_weights", 4 * elements, "4 x trained parameters of the rank's share", source),)


def _secondary(scope: Scope, whole: Column, source: str) -> Item:
    """ZeRO++'s second partition: the 16-bit weights again over the ranks of a node, ``zero_hpz_partition_size`` (arXiv:2306.10209)."""
    ranks = scope.option("zero_hpz_partition_size", 1)
    size = scope.dtype_bytes * whole / ranks if ranks > 1 else 0.0 * whole
    return item(
        "secondary partition of the weights", "parameters", size, f"{scope.dtype_bytes} x parameters / zero_hpz_partition_size", source
    )


def megatron(scope: Scope, rank: Rank) -> Accounts:
    """Parameters and the contiguous gradient buffer whole; fp32 masters and states over dp x cp (``--use-distributed-optimizer``).

    In fp8 NVIDIA's recipes keep the fp8 forms of a weight (row- and column-wise) as the weight itself, ``fp8_param_gather``: together
    they weigh what
    16 bits do. Option ``fp8_param_gather = false`` adds them to 16-bit weights.
    """
    source = "megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py"
    held, c = rank.held, scope.dtype_bytes
    share = sharded(scope, rank)
    products = held.products if scope.job.precision in ("fp8", "fp4") and scope.job.method == "full" else 0.0 * held.products
    plain = held.all_trained + held.frozen
    copies = scope.fp8_copies
    kept_in_16_bits = not scope.structure.fp8_params and scope.options.get("fp8_param_gather") is False
    if scope.structure.fp8_params or kept_in_16_bits or copies == 0:
        size = c * (plain - products * scope.structure.fp8_params) + copies * products
        formula = "2 x parameters (16 bits) + fp8 forms of products" if copies else f"{c} x parameters of the rank"
    else:
        size, formula = c * plain, f"{c} x parameters of the rank (products: two fp8 forms instead of 16 bits, fp8_param_gather)"
    parameters = item("weights", "parameters", size, formula, source)
    quantized = quantized_items(scope, held.quantized)
    main = scope.options_bytes("main_grads_dtype", scope.gradient_bytes)
    gradient = item("gradient buffer", "gradients", main * held.all_trained, f"{main} x trained parameters", source)
    first, second = scope.options_bytes("exp_avg_dtype", 4), scope.options_bytes("exp_avg_sq_dtype", 4)
    stored = (first + second) / 2 if scope.masters or c == 4 else c
    return Accounts(
        parameters=(parameters, *quantized),
        masters=_masters(scope, share, source),
        gradients=(gradient,),
        optimizer=optimizer_items(scope, rank, share, stored, source),
        always=(_dummy_gradients(scope),),
        early=1.0,
    )


def _dummy_gradients(scope: Scope) -> Item:
    """Weight gradients go straight into the buffer; autograd still gets an empty 16-bit tensor, of which TransformerEngine keeps one for
    each shape.
    """
    seen: set[tuple[str, tuple[int, ...]]] = set()
    elements = np.zeros(len(scope))
    for block in scope.model.blocks.values():
        for op in block.rows("linear", "grouped_linear"):
            for weight in op.weights:
                if len(weight.shape) >= 2 and (op.name, weight.shape) not in seen:
                    seen.add((op.name, weight.shape))
                    local = local_elements(weight, scope)
                    elements = elements + (
                        local / ceil_div(float(weight.shape[weight.ep_dim]), scope.ep) if weight.ep_dim is not None else local
                    )
    size = scope.dtype_bytes * elements * (scope.job.method == "full")
    return item(
        "placeholders of weight gradients",
        "gradients",
        size,
        "2 x one weight of each shape",
        "transformer_engine module/base.py get_dummy_wgrad",
    )


def quantized_items(scope: Scope, elements: Column, shards: Column | float = 1.0) -> tuple[Item, ...]:
    if scope.job.method != "qlora":
        return ()
    kind = scope.job.base_quantization or "nf4"
    return (
        item(
            f"base weights in {kind}",
            "parameters",
            quantized_bytes(elements, scope) / shards,
            f"bits of {kind} / 8 x base weights",
            "arXiv:2305.14314",
        ),
    )


def deepspeed(scope: Scope, rank: Rank) -> Accounts:
    if scope.stage == 3:
        return _zero3(scope, rank)
    return _zero12(scope, rank)


def _zero12(scope: Scope, rank: Rank) -> Accounts:
    """ZeRO-0, 1, 2. fp32 gradients beside bf16 weights mean BF16_Optimizer: it keeps the bf16 gradients and an fp32 accumulation of all
    of them.
    """
    source = "deepspeed/runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py"
    held, c, g = rank.held, scope.dtype_bytes, scope.gradient_bytes
    trained, share = held.all_trained, sharded(scope, rank)
    parameters = item("weights", "parameters", c * trained + scope.frozen_bytes * held.frozen, f"{c} x parameters of the rank", source)
    gradients = [
        item("gradients", "gradients", min(c, g) * (share if scope.stage == 2 else trained), f"{min(c, g)} x trained parameters", source)
    ]
    early: Column | float = np.where(scope.accumulation > 1, 1.0, 0.0)
    if g > c and scope.masters:
        gradients.append(item("fp32 accumulation of gradients", "gradients", g * trained, f"{g} x trained parameters", source))
        early = 1.0
    step: tuple[Item, ...] = ()
    if scope.masters and g == c:
        what = "fp32 copy of the partition's gradients"
        step = (item(what, "gradients", (4 + c) * share, "(4 + 2) x trained parameters / shards", source, "flat"),)
    return Accounts(
        parameters=(parameters, *quantized_items(scope, held.quantized)),
        masters=_masters(scope, share, source),
        gradients=tuple(gradients),
        optimizer=optimizer_items(scope, rank, share, 4 if scope.masters else c, source),
        always=(_buckets(scope, trained, source),) if scope.stage else (),
        early=early,
        step=step,
        leftovers=(_flattened(scope, trained, source),) if g > c and scope.masters else (),
    )


def _flattened(scope: Scope, trained: Column, source: str) -> Item:
    """BF16_Optimizer flattens the weights on the card after they were built there. The originals' blocks stay reserved; published device
    peaks of such
    runs lie about that much (2 bytes a parameter) above what is live.
    """
    return item("blocks freed by flattening", "parameters", scope.dtype_bytes * trained, "2 x trained parameters", source, "flat")


def _buckets(scope: Scope, trained: Column, source: str) -> Item:
    """Reduction buckets (two with ``overlap_comm``) and one all-gather bucket of at most 5e8 elements each; none on a single rank."""
    elements = np.minimum(scope.option("reduce_bucket_size", 5e8), trained)
    gathered = np.minimum(scope.option("allgather_bucket_size", 5e8), trained)
    copies = 2 if scope.switch("overlap_comm", True) else 1
    size = np.where(scope.shards > 1, scope.dtype_bytes * (copies * elements + gathered), 0.0)
    return item(
        "reduce and all-gather buckets", "communication_buffers", size, "2 x (2 reduce_bucket_size + allgather_bucket_size)", source
    )


def _zero3(scope: Scope, rank: Rank) -> Accounts:
    """ZeRO-3: shards, and a window of gathered parameters of at most ``stage3_max_live_parameters``; a single rank gathers nothing."""
    source = "deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py"
    held, c = rank.held, scope.dtype_bytes
    share = sharded(scope, rank)
    whole = held.all_trained + held.frozen
    parameters = item("sharded weights", "parameters", c * (share + sharded_frozen(scope, held)), f"{c} x parameters / shards", source)
    g = min(scope.gradient_bytes, 4)
    gathers = (scope.shards > 1) | scope.offloads_parameters
    live = np.minimum(scope.option("stage3_max_live_parameters", 1e9), whole)
    fetched = np.minimum(np.maximum(scope.option("stage3_prefetch_bucket_size", 5e7), rank.largest), whole)
    window = item(
        "gathered parameters",
        "communication_buffers",
        np.where(gathers, c * np.minimum(live + fetched, whole), 0.0),
        f"{c} x (live + fetched)",
        source,
        "gather",
    )
    bucket = np.minimum(scope.option("reduce_bucket_size", 5e8), held.all_trained)
    reduce = item(
        "gradient bucket", "communication_buffers", np.where(scope.shards > 1, c * bucket, 0.0), f"{c} x reduce_bucket_size", source
    )
    group = np.minimum(scope.option("sub_group_size", 1e9), share)
    norm = 8 * rank.largest / scope.shards * (scope.job.method == "full")
    step = (
        item("fp32 gradients of a sub-group", "gradients", 4.0 * group * scope.masters, "4 x sub_group_size", source, "flat"),
        item("fp64 copy for the gradient norm", "gradients", norm, "8 x largest tensor / shards", source, "flat"),
    )
    return Accounts(
        parameters=(parameters, *quantized_items(scope, held.quantized, scope.shards)),
        masters=_masters(scope, share, source),
        gradients=(item("sharded gradients", "gradients", g * share, f"{g} x trained parameters / shards", source),),
        optimizer=optimizer_items(scope, rank, share, 4 if scope.masters else c, source),
        always=(reduce, _secondary(scope, whole, source)),
        early=1.0,
        loss=(window,),
        block=(window,),
        last=(
            window,
            item(
                "gradient of the largest tensor",
                "gradients",
                c * rank.largest * (scope.job.method == "full"),
                f"{c} x largest tensor",
                source,
            ),
        ),
        step=step,
    )


@dataclass(frozen=True)
class Offloaded:
    """Accounts after offload, and the bytes that moved off this rank."""

    accounts: Accounts
    moved: tuple[Item, ...]


def offload(scope: Scope, found: Accounts) -> Offloaded:
    """optimizer-*: masters and states leave the card, DeepSpeed's gradients too; params-*: parameters and gradients as well. Megatron's
    ``optimizer_offload_fraction`` says which share of the states.
    """
    kind = scope.structure.offload
    if kind not in ("optimizer-cpu", "optimizer-nvme", "params-cpu", "params-nvme"):
        return Offloaded(found, ())
    share = scope.option("optimizer_offload_fraction", 1.0) if scope.structure.framework == "megatron" else 1.0
    moved = [i.scaled(share) for i in (*found.masters, *found.optimizer)]
    stays = 1.0 - share
    left = replace(
        found,
        masters=tuple(i.scaled(stays) for i in found.masters),
        optimizer=tuple(i.scaled(stays) for i in found.optimizer),
        step=tuple(i.scaled(stays) for i in found.step),
    )
    if kind.startswith("params") or scope.structure.framework == "deepspeed":
        moved += found.gradients
        left = replace(left, gradients=())
    if kind.startswith("params"):
        moved += found.parameters
        left = replace(left, parameters=())
    return Offloaded(left, tuple(moved))


def paged(scope: Scope, rank: Rank) -> tuple[Item, ...]:
    """States of a paged optimizer: unified memory, which the driver keeps on the host while the card is full."""
    kind = optimizer_of(scope)
    if not kind.pageable:
        return ()
    return (item("paged states", "optimizer", state_bytes(replace(kind, pageable=False), sharded(scope, rank), rank.held, 4.0)),)
