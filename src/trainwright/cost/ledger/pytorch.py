"""What PyTorch's own wrappers hold, where the tape has no rule for the model or the layout: FSDP1, FSDP2, DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..table import Column
from .accounts import Rank, deepspeed, megatron, optimizer_items, quantized_items, sharded, sharded_frozen
from .items import Accounts, Item, item
from .scope import Scope, add_up
from .weights import local_elements, optimizer_of, quantized_bytes

SOURCE = "torch/distributed/fsdp: _flat_param.py, _runtime_utils.py; _fully_shard/_fsdp_param_group.py"


@dataclass(frozen=True)
class Windows:
    """Gathered weights: the root (or everything that is not resharded), what of it is there at the end of backward, one group, two groups (in use and
    prefetched)."""

    root: Item
    last: Item
    one: Item
    two: Item


def windows(scope: Scope, rank: Rank) -> Windows:
    """A group is gathered in the type that modules read (a quantized base as it is stored); FSDP1 gathers nothing where a single rank holds that type
    itself, FSDP2 copies it all the same.
    """
    c = scope.each("read")
    root = c * (rank.root.everything - rank.root.quantized)
    layer = c * (rank.layer.everything - rank.layer.quantized) + quantized_bytes(rank.layer.quantized, scope)
    whole = c * (rank.held.everything - rank.held.quantized) + quantized_bytes(rank.held.quantized, scope)
    fsdp2 = scope.structure.framework == "fsdp2"
    gathers = wrapped(scope) * ((scope.shards > 1) | scope.offloads_parameters | scope.types.mixed | fsdp2)
    # ZeRO-2 keeps everything gathered; so does torchtitan between pipeline stages, and replicate() has a copy in the compute type.
    stays = np.full(len(scope), scope.stage in (0, 2)) | (fsdp2 & (scope.pp > 1))
    kept = gathers * np.where(stays, whole, root)
    name = "gathered root parameters" if scope.stage == 3 else "gathered parameters"
    text = f"{scope.types.read} x"
    return Windows(
        item(name, "communication_buffers", kept, f"{text} root, or all that is not resharded", SOURCE, "gather"),
        item(name, "communication_buffers", gathers * np.where(stays & (scope.pp > 1), whole, root), f"{text} root", SOURCE, "gather"),
        item("gathered layer", "communication_buffers", gathers * layer * ~stays, f"{text} a layer", SOURCE, "gather"),
        item("gathered layers", "communication_buffers", gathers * 2 * layer * ~stays, f"2 x {text} a layer", SOURCE, "gather"),
    )


def wrapped(scope: Scope) -> Column:
    """1.0 where FSDP wraps the model: any sharding, and FSDP2's ``replicate()`` over more than one rank."""
    nothing = scope.structure.framework == "fsdp2" and scope.stage == 0
    return np.where(nothing & (scope.data_ranks == 1), 0.0, 1.0)


@dataclass(frozen=True)
class Copies:
    """16-bit copies that products make of wider weights, cached until forward ends: of all of them, of what backward keeps, of a layer."""

    rest: Item
    kept: Item
    layer: Item


def copies(scope: Scope, rank: Rank, made: bool) -> Copies:
    """A product saves its copy for backward; one that is recomputed makes another then (aten/src/ATen/autocast_mode.cpp `cached_cast`). A compiled block has
    no cache: what it recomputes it does not hold (torch 2.13's partitioner saves the copies all the same)."""
    c, source = scope.c * made, "torch.autocast"
    s = scope.structure
    again = s.recompute == "full" or (s.recompute == "selective" and not s.recompute_modules)
    cached = not s.compile and scope.job.method == "full"  # of leaves that want gradients alone; what is frozen is copied anew
    tied = rank.root.trained * rank.slot.head if scope.model.tied else 0.0
    every = c * (rank.held.products + tied)
    root, layer = c * (rank.root.products + tied), c * rank.layer.products
    name, part = "16-bit copies of weights", "communication_buffers"
    return Copies(
        item(name, part, (every - root) * (again and cached), f"{scope.c} x products of layers", source),
        item(name, part, root if again else every, f"{scope.c} x products", source),
        item(name, part, layer, f"{scope.c} x products of a layer", source),
    )


def whole_table(scope: Scope, rank: Rank) -> Column:
    """Elements that DTensor keeps of a split embedding table's gradient beyond the rank's own, where no wrapper cuts or copies it."""
    if scope.job.method != "full":
        return np.zeros(len(scope))
    others = add_up((w.elements - local_elements(w, scope) for w in scope.model.embedding.weights), len(scope))
    return np.where(scope.data_ranks == 1, others * rank.slot.embedding, 0.0)


def replicated(scope: Scope) -> np.ndarray:
    """Where FSDP2's ``replicate()`` holds whole copies."""
    return (scope.data_ranks > 1) & (scope.structure.framework == "fsdp2" and scope.stage == 0)


def _put_off(scope: Scope) -> Column:
    """1.0 where whole gradients of the micro-batches are kept, and reduced after the last one."""
    full, fsdp2 = scope.job.method == "full" and scope.stage > 0, scope.structure.framework == "fsdp2"
    quiet = scope.framework.memory.puts_off(scope.model.family, scope.structure)
    later = (((scope.pp > 1) & fsdp2) | quiet) & full | replicated(scope)
    return (scope.accumulation > 1) & later


def _whole_gradients(scope: Scope, rank: Rank, put_off: Column, owned: Column) -> tuple[Item, Item]:
    """Those of the micro-batches so far, and what is left of them at the end of backward: each group's are reduced after its last backward pass, all of
    them at the end between stages, where shards (`owned` bytes) take their place."""
    g, name = scope.each("reduced"), "whole gradients of the micro-batches so far"
    size = put_off * g * rank.held.all_trained
    left = np.where(scope.pp > 1, np.maximum(size - owned, 0.0), put_off * g * rank.root.all_trained)
    text = f"{scope.types.reduced} x trained parameters"
    return item(name, "gradients", size, text, SOURCE), item(name, "gradients", left, text, SOURCE)


def stepping(scope: Scope, rank: Rank, share: Column, stepped: Column | float) -> Item:
    """Beside the states, while torch.optim steps without a fused kernel: square roots of all tensors at once (foreach), or a few copies of one."""
    kind, kernel = optimizer_of(scope), scope.job.optimizer_kernel
    largest = np.minimum(rank.largest / scope.shards, share)
    elements = largest * kind.temporaries if kernel == "for-loop" or kind.name in ("adafactor", "muon") else 0.0 * share
    if kernel == "foreach" and kind.name in ("adamw", "lion"):
        elements = share
    return item("copies while the optimizer steps", "optimizer", stepped * elements, "square roots, quotients", kind.source)


def fsdp(scope: Scope, rank: Rank) -> Accounts:
    """One sharded copy in the stored type; the root's parameters and gradients whole from forward to the end of backward.

    A layer's whole gradients are reduced in `gradient_dtype` while the next one's are made. FSDP1's root is one flat parameter whose
    gradient is
    concatenated, cast and reduced at the very end. Micro-batches are reduced one by one into sharded gradients; whole ones of the reduced
    type
    accumulate where communication is put off (`MemoryRules.puts_off`; FSDP2 between pipeline stages too).
    """
    held = rank.held
    stored, c, g = scope.each("stored"), scope.each("read"), scope.each("reduced")
    types = scope.types
    fsdp1 = scope.structure.framework == "fsdp1"
    share, w, cast = sharded(scope, rank), windows(scope, rank), copies(scope, rank, types.autocast)
    flat = float(scope.job.method == "full" and scope.stage > 0)  # without sharding a gradient is its tensor's own
    at_once = scope.job.optimizer_in_backward  # of what is reduced only a group's shards are there, until they are used
    owned = 0.0 * share if at_once else share + whole_table(scope, rank) * (1.0 - wrapped(scope))
    using = item(
        "gradients being used",
        "gradients",
        stored * np.minimum(rank.layer.all_trained, share) * at_once,
        f"{types.stored} x a layer",
        SOURCE,
    )
    root = rank.root.all_trained * flat
    root_gradient = item("whole gradients of the root", "gradients", c * root, f"{types.read} x root", SOURCE)
    pool = "reduce" if fsdp1 else "work"  # FSDP1 casts on its post-backward stream, FSDP2 copies in on the current one
    text = f"{types.reduced} x"
    reducing = item("gradients of a layer in reduction", "gradients", g * rank.layer.all_trained * flat, f"{text} a layer", SOURCE, pool)
    reduce_root = item("root gradients in reduction", "communication_buffers", (g + c * fsdp1) * root, f"{text} root", SOURCE, pool)
    # FSDP2 gives back what is gathered before it lays out the root's reduction: the larger of both, the windows of the last layers beside
    before = w.last.bytes + w.two.bytes + reducing.bytes
    gathered = w.last if fsdp1 else replace(w.last, bytes=np.maximum(before - reduce_root.bytes, 0.0))
    put_off = _put_off(scope)
    accumulated, remains = _whole_gradients(scope, rank, put_off, stored * owned)
    # what replicas all-reduce before it is cast to the stored type stays until backward is over
    waits = g * share * ((g != stored) & ((scope.column("dp_replicate") > 1) | replicated(scope)) & (not fsdp1))
    waiting = item("reduced gradients of all groups", "communication_buffers", waits, f"{text} trained parameters / shards", SOURCE)
    weights = stored * (share + sharded_frozen(scope, held))
    masters = 4 * scope.each("masters") * share
    return Accounts(
        parameters=(
            item("sharded weights", "parameters", weights, f"{types.stored} x parameters / shards", SOURCE),
            *quantized_items(scope, held.quantized, scope.shards),
        ),
        masters=(item("fp32 master weights", "master_weights", masters, "4 x trained parameters", "torch.optim"),),
        gradients=(
            item("sharded gradients", "gradients", stored * owned, f"{types.stored} x trained parameters / shards", SOURCE, "reduce"),
        ),
        optimizer=optimizer_items(scope, rank, share, scope.each("stepped"), SOURCE),
        early=(scope.accumulation > 1) * (1.0 - put_off),
        forward=(cast.rest,),
        loss=(w.root, w.one, accumulated, cast.kept),
        block=(w.root, w.two, root_gradient, reducing, accumulated, cast.kept, cast.layer, using),
        last=(gathered, root_gradient, reduce_root, remains, waiting, cast.layer, using),
        step=(stepping(scope, rank, share, scope.each("stepped")),),
        leftovers=(w.one,) if fsdp1 else (),  # its rate limiter lets two gathers run beside the layer in use
    )


def ddp(scope: Scope, rank: Rank) -> Accounts:
    """Whole parameters and gradients in the stored type. The buckets are the gradients and stay over the step; gradients accumulate
    beside them.
    """
    source = "torch/nn/parallel/distributed.py, torch.autocast"
    held, types, share = rank.held, scope.types, sharded(scope, rank)
    stored, trained = types.stored, held.all_trained
    full = float(scope.job.method == "full")
    cast = copies(scope, rank, stored > scope.c)
    frozen = scope.frozen_bytes if scope.job.method == "qlora" else stored
    whole = item("gradient of the largest tensor", "gradients", stored * rank.largest * full, f"{stored} x largest", source)
    buckets = scope.data_ranks > 1  # which hold every gradient, used or not
    gradients = stored * (trained + whole_table(scope, rank)) * (buckets | (not scope.job.optimizer_in_backward))
    several = scope.accumulation > 1
    twice = item("gradients beside the buckets", "gradients", stored * trained * (buckets & several), f"{stored} x trained", source)
    masters = 4 * trained * types.masters
    return Accounts(
        parameters=(
            item("weights", "parameters", stored * trained + frozen * held.frozen, f"{stored} x parameters", source),
            *quantized_items(scope, held.quantized),
        ),
        masters=(item("fp32 master weights", "master_weights", masters, "4 x trained parameters", "torch.optim"),),
        gradients=(item("gradients", "gradients", gradients, f"{stored} x trained parameters", source),),
        optimizer=optimizer_items(scope, rank, share, types.stepped, source),
        early=np.where(buckets | several, 1.0, 0.0),
        forward=(cast.rest,),
        loss=(cast.kept, twice),
        block=(cast.kept, cast.layer, whole, twice),
        last=(cast.layer, twice),
        step=(stepping(scope, rank, share, types.stepped),),
    )


FRAMEWORK_ACCOUNTS = {"megatron": megatron, "deepspeed": deepspeed, "fsdp1": fsdp, "fsdp2": fsdp, "ddp": ddp}


def accounts(scope: Scope, rank: Rank) -> Accounts:
    """The accounts of the structure's framework."""
    return FRAMEWORK_ACCOUNTS[scope.structure.framework](scope, rank)
