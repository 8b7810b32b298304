"""Tensor and sequence parallelism: what the products of a block send, from its rows.

DTensor (PyTorch) reduces the input gradient of every column-parallel product on its own; Megatron reduces that of all products that share
an input once. With sequence parallelism both gather a shared input once and scatter the output of every row-parallel product.

    per layer, llama          forward                  backward
    DTensor                   2 all-reduce             5 all-reduce (q, k, v, gate, up)
    Megatron                  2 all-reduce             2 all-reduce
    DTensor, sequence         2 AG + 2 RS              2 AG + 2 RS
    Megatron, sequence        2 AG + 2 RS              4 AG + 2 RS (the input is kept sharded and gathered again)

Sources: arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2.2, torch.distributed.tensor.parallel,
megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...spec.blocks import Block, Op
from ..message import Phase
from ..table import IntColumn
from .columns import Case, ceil_div, column_inputs, row_products


def tensor_parallel(case: Case) -> None:
    """Every message of the tp axis."""
    if not (case.tp > 1).any():
        return
    megatron = case.structure.framework in ("megatron", "deepspeed")
    for block, count in case.stage.blocks(case.model):
        if block is case.model.embedding:
            _embedding(case, block, count)
        else:
            passes = count * head_passes(case) if block is case.model.head else count
            _products(case, block, passes, megatron)
    _loss(case, megatron)
    _recompute(case, megatron)
    _replicated_gradients(case, megatron)


def head_passes(case: Case) -> int:
    """How often the output projection and the loss run: once more for every multi-token-prediction layer without a loss of its own."""
    return 1 + sum(not block.rows("cross_entropy") for block in case.model.mtp)


def _add(case: Case, collective: str, phase: Phase, width: IntColumn | int, calls: IntColumn, what: str, overlaps: str = "") -> None:
    size = case.tokens * width * case.activation_bytes
    case.add("tp", collective, phase, size, calls * case.micro_batches, case.tp, 1, overlaps=overlaps, what=what)


def _products(case: Case, block: Block, count: IntColumn, megatron: bool) -> None:
    """Forward and backward of the products of a layer or of the head."""
    hidden_behind = "product" if case.structure.async_tp else ""
    for _, ops in column_inputs(block):
        width = ops[0].k
        if case.sequence_parallel:
            _add(case, "all_gather", "forward", width, count, f"input of {_names(ops)}", hidden_behind)
            if megatron:
                _add(case, "all_gather", "backward", width, count, f"input of {_names(ops)} again", "product")
            _add(
                case,
                "reduce_scatter",
                "backward",
                width,
                count,
                f"input gradient of {_names(ops)}",
                "product" if megatron else hidden_behind,
            )
        elif megatron:
            _add(case, "all_reduce", "backward", width, count, f"input gradient of {_names(ops)}", "product")
        else:
            for op in ops:
                _add(case, "all_reduce", "backward", op.k, count, f"input gradient of {op.name}")
    for op in row_products(block):
        if case.sequence_parallel:
            _add(case, "reduce_scatter", "forward", op.width, count, f"output of {op.name}", hidden_behind)
            _add(case, "all_gather", "backward", op.width, count, f"output gradient of {op.name}", hidden_behind)
        else:
            _add(case, "all_reduce", "forward", op.width, count, f"output of {op.name}", hidden_behind)


def _names(ops: Iterable[Op]) -> str:
    return ", ".join(op.name for op in ops)


def _embedding(case: Case, block: Block, count: IntColumn) -> None:
    """Rows of a table that is split by vocabulary: a partial sum. The position table is split with sequence parallelism only, and read
    once a batch where no packed documents give each sequence positions of its own."""
    for op in block.rows("embedding"):
        table = op.weights[0]
        if table.tp_dim is None or (table.tp_needs_sp and not case.sequence_parallel):
            continue
        if table.tp_needs_sp:
            if case.structure.framework in ("megatron", "deepspeed"):
                continue  # Megatron keeps the position table whole on every rank
            tokens = case.tokens if case.job.packing else case.tokens // case.table.micro_batch_size
        else:
            tokens = case.tokens
        size = tokens * op.width * case.activation_bytes
        calls = count * case.micro_batches
        if case.sequence_parallel:
            case.add("tp", "reduce_scatter", "forward", size, calls, case.tp, 1, what=f"output of {op.name}")
            case.add("tp", "all_gather", "backward", size, calls, case.tp, 1, what=f"output gradient of {op.name}")
        else:
            case.add("tp", "all_reduce", "forward", size, calls, case.tp, 1, what=f"output of {op.name}")


def _loss(case: Case, megatron: bool) -> None:
    """Logits stand split by vocabulary: gathered whole, or the loss reduces maximum, target logit and sum of each token (fp32)."""
    passes = case.stage.head * head_passes(case)
    calls = passes * case.micro_batches
    if megatron or case.job.loss == "vocab-parallel":
        case.add("tp", "all_reduce", "loss", 4 * case.tokens, 3 * calls, case.tp, 1, what="maximum, target and sum of the softmax")
    else:
        _add(case, "all_gather", "loss", ceil_div(case.model.vocab, case.tp) * case.tp, passes, "logits")


def forward_collectives(case: Case, block: Block) -> list[tuple[str, int]]:
    """(collective, width a token) of a layer's forward pass in the order of its rows."""
    gathered: set[str] = set()
    found = []
    columns = {id(op): name for name, ops in column_inputs(block) for op in ops}
    for op in block.ops:
        name = columns.get(id(op))
        if name is not None and case.sequence_parallel and name not in gathered:
            gathered.add(name)
            found.append(("all_gather", op.k))
        if op.kind == "linear" and op.parallel == "row":
            found.append(("reduce_scatter" if case.sequence_parallel else "all_reduce", op.width))
    return found


def _recompute(case: Case, megatron: bool) -> None:
    """What the second forward pass sends again."""
    structure = case.structure
    if structure.recompute == "none":
        return
    layers = case.stage.layers
    total = np.add.reduce(list(layers.values()))
    for name, count in layers.items():
        block = case.model.blocks[name]
        again = (
            _selected(case, forward_collectives(case, block), block)
            if structure.recompute == "selective"
            else forward_collectives(case, block)
        )
        for i, (collective, width) in enumerate(again):
            calls = count
            if structure.recompute == "full" and not megatron and i == len(again) - 1:
                # the run stops at the last tensor that backward wants, so a region's last product never runs
                calls = np.maximum(0, count - ceil_share(case.stage.regions, count, total))
            _add(case, collective, "recompute", width, calls, f"recomputed {collective} of {block.name}")


def ceil_share(regions: IntColumn, count: IntColumn, total: IntColumn) -> IntColumn:
    """Regions that end in a layer of this kind: their share of all layers."""
    return -(-(regions * count) // np.maximum(total, 1))


def _selected(case: Case, collectives: list[tuple[str, int]], block: Block) -> list[tuple[str, int]]:
    """What selective recomputation sends again.

    Megatron: modules; only a whole ``mlp`` has collectives. FSDP2 (torchtitan): every second product is kept, and with it the outputs of
    reduce-scatters; gathers run again, and without sequence parallelism every all-reduce but the last, whose sum nobody reads (counted with
    torch 2.13 under a fake process group, with and without biases).
    """
    modules = case.structure.recompute_modules
    if case.structure.framework in ("megatron", "deepspeed") or modules:
        dense_mlp = "mlp" in modules and "moe" not in block.tags
        return collectives[len(collectives) // 2 :] if dense_mlp else []
    if case.sequence_parallel:
        return [c for c in collectives if c[0] == "all_gather"]
    return collectives[:-1]  # whether a product is kept or not, its all-reduce is not


def _replicated_gradients(case: Case, megatron: bool) -> None:
    """With sequence parallelism each rank saw a part of the tokens, so the gradients of replicated weights are summed over tp."""
    if not case.sequence_parallel:
        return
    blocks = list(case.stage.blocks(case.model))
    if megatron:
        elements = np.zeros(len(case.table), dtype=np.int64)
        for block, count in blocks:
            for op in block.ops:
                replicated = sum(w.elements for w in op.weights if w.tp_dim is None and w.ep_dim is None and op.region == "sequence")
                elements = elements + count * replicated
        case.add(
            "tp",
            "all_reduce",
            "reduce",
            elements * case.gradient_bytes,
            1,
            case.tp,
            1,
            what="gradients of replicated weights, in one piece",
        )
        return
    trainable = {id(w) for block, _ in blocks for w in case.trainable(block)}
    # under FSDP the sum runs in backward on the compute type, before each reduction; without, in the optimizer on the stored type
    sharded = (case.shard > 1) & (case.structure.sharding != "none")
    # torch.optim: each operation that reads the gradient lays it out anew; AdamW reads it once in lerp and twice in addcmul, fused kernels once
    reads = 3 if case.job.optimizer == "adamw" and case.job.optimizer_kernel != "fused" else 1
    ways: tuple[tuple[Phase, int, IntColumn], ...] = (
        ("backward", case.activation_bytes, np.where(sharded, case.reductions, 0)),
        ("optimizer", case.stored_bytes, np.where(sharded, 0, reads)),
    )
    for block, count in blocks:
        for w in (w for op in block.rows("norm", "router") if op.region == "sequence" for w in op.weights if id(w) in trainable):
            for phase, size, calls in ways:
                case.add("tp", "all_reduce", phase, w.elements * size, count * calls, case.tp, 1, what="gradients of norms and routers")
