"""What PyTorch's own wrappers hold, where the tape has no rule for the model or the layout: FSDP1, FSDP2, DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..table import Column
from .accounts import Rank, deepspeed, megatron, optimizer_items, quantized_items, sharded, sharded_frozen
from .items import Accounts, Item, item
from .scope import Scope
from .weights import quantized_bytes

SOURCE = "torch/distributed/fsdp: _flat_param.py, _runtime_utils.py; _fully_shard/_fsdp_param_group.py"


@dataclass(frozen=True)
class Windows:
    """Gathered weights: the root (or everything that is not resharded), one group, two groups (in use and prefetched)."""

    root: Item
    one: Item
    two: Item


def windows(scope: Scope, rank: Rank) -> Windows:
    """A group is gathered in the compute type (a quantized base as it is stored); nothing is where a single rank holds the compute type
    itself.
    """
    c = scope.dtype_bytes
    root = c * (rank.root.everything - rank.root.quantized)
    layer = c * (rank.layer.everything - rank.layer.quantized) + quantized_bytes(rank.layer.quantized, scope)
    whole = c * (rank.held.everything - rank.held.quantized) + quantized_bytes(rank.held.quantized, scope)
    gathers = np.where((scope.shards > 1) | scope.offloads_parameters | scope.masters, 1.0, 0.0)
    # ZeRO-2 keeps everything gathered; so does torchtitan between pipeline stages, and replicate() has a copy in the compute type.
    stays = np.full(len(scope), scope.stage in (0, 2)) | ((scope.structure.framework == "fsdp2") & (scope.pp > 1))
    kept = gathers * np.where(stays, whole, root)
    name = "gathered root parameters" if scope.stage == 3 else "gathered parameters"
    return Windows(
        item(name, "communication_buffers", kept, f"{c} x root, or all that is not resharded", SOURCE, "gather"),
        item("gathered layer", "communication_buffers", gathers * layer * ~stays, f"{c} x a layer", SOURCE, "gather"),
        item("gathered layers", "communication_buffers", gathers * 2 * layer * ~stays, f"2 x {c} x a layer", SOURCE, "gather"),
    )


def fsdp(scope: Scope, rank: Rank) -> Accounts:
    """One sharded copy in the stored type; the root's parameters and gradients whole from forward to the end of backward.

    A layer's whole gradients are reduced in `gradient_dtype` while the next one's are made. FSDP1's root is one flat parameter whose
    gradient is
    concatenated, cast and reduced at the very end. Micro-batches are reduced one by one into sharded gradients; whole ones of the reduced
    type
    accumulate where communication is put off (FSDP1: `MemoryRules.puts_off`; FSDP2: option ``no_sync``, and between pipeline stages).
    """
    held, c, g = rank.held, scope.dtype_bytes, scope.gradient_bytes
    fsdp1 = scope.structure.framework == "fsdp1"
    stored = 4 if scope.masters else c
    share, w = sharded(scope, rank), windows(scope, rank)
    flat = float(scope.job.method == "full" and scope.stage > 0)  # without sharding a gradient is its tensor's own
    owned = np.minimum(rank.layer.all_trained, share) if scope.job.optimizer_in_backward else share
    root = rank.root.all_trained * flat
    root_gradient = item("whole gradients of the root", "gradients", c * root, f"{c} x root", SOURCE)
    pool = "reduce" if fsdp1 else "work"  # FSDP1 casts on its post-backward stream, FSDP2 copies in on the current one
    reducing = item("gradients of a layer in reduction", "gradients", g * rank.layer.all_trained * flat, f"{g} x a layer", SOURCE, pool)
    reduce_root = item("root gradients in reduction", "communication_buffers", (g + c * fsdp1) * root, f"{g} x root", SOURCE, pool)
    several: Column = np.where(scope.accumulation > 1, 1.0, 0.0)
    quiet = scope.framework.memory.puts_off(scope.model.family, scope.options) if fsdp1 else scope.switch("no_sync", False)
    put_off = several * flat * np.where((scope.pp > 1) & (not fsdp1) | quiet, 1.0, 0.0)
    so_far = put_off * g * held.all_trained
    accumulated = item("whole gradients of the micro-batches so far", "gradients", so_far, f"{g} x trained parameters", SOURCE)
    weights = stored * (share + sharded_frozen(scope, held))
    return Accounts(
        parameters=(
            item("sharded weights", "parameters", weights, f"{stored} x parameters / shards", SOURCE),
            *quantized_items(scope, held.quantized, scope.shards),
        ),
        masters=(),
        gradients=(item("sharded gradients", "gradients", stored * owned, f"{stored} x trained parameters / shards", SOURCE, "reduce"),),
        optimizer=optimizer_items(scope, rank, share, stored, SOURCE),
        early=several * (1.0 - put_off),
        loss=(w.root, w.one, accumulated),
        block=(w.root, w.two, root_gradient, reducing, accumulated),
        last=(w.root, root_gradient, reduce_root, accumulated),
        leftovers=(w.one,) if fsdp1 else (),  # its rate limiter lets two gathers run beside the layer in use
    )


def ddp(scope: Scope, rank: Rank) -> Accounts:
    """Whole parameters and gradients in the stored type. The buckets are the gradients and stay over the step; gradients accumulate
    beside them.
    """
    source = "torch/nn/parallel/distributed.py, torch.autocast"
    held, c = rank.held, scope.dtype_bytes
    stored = 4 if scope.masters else c
    trained = held.all_trained
    full = float(scope.job.method == "full")
    copies = c * held.products * (scope.masters or scope.job.autocast)
    cast = item("16-bit copies of weights", "communication_buffers", copies, f"{c} x products", source)
    frozen = scope.frozen_bytes if scope.job.method == "qlora" else stored
    whole = item("gradient of the largest tensor", "gradients", stored * rank.largest * full, f"{stored} x largest", source)
    gradients = stored * (np.minimum(rank.largest, trained) if scope.job.optimizer_in_backward else trained)
    buckets = (scope.data_ranks > 1) & (not scope.job.optimizer_in_backward)
    several = scope.accumulation > 1
    twice = item("gradients beside the buckets", "gradients", stored * trained * (buckets & several), f"{stored} x trained", source)
    return Accounts(
        parameters=(
            item("weights", "parameters", stored * trained + frozen * held.frozen, f"{stored} x parameters", source),
            *quantized_items(scope, held.quantized),
        ),
        masters=(),
        gradients=(item("gradients", "gradients", gradients, f"{stored} x trained parameters", source),),
        optimizer=optimizer_items(scope, rank, sharded(scope, rank), stored, source),
        early=np.where(buckets | several, 1.0, 0.0),
        loss=(cast, twice),
        block=(cast, whole, twice),
        last=(cast, twice),
    )


FRAMEWORK_ACCOUNTS = {"megatron": megatron, "deepspeed": deepspeed, "fsdp1": fsdp, "fsdp2": fsdp, "ddp": ddp}


def accounts(scope: Scope, rank: Rank) -> Accounts:
    """The accounts of the structure's framework."""
    return FRAMEWORK_ACCOUNTS[scope.structure.framework](scope, rank)
