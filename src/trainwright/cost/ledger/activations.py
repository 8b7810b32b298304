"""Activations of blocks and of the loss: what stays between forward and backward, and what a block's backward holds at its worst row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ...frameworks.base import SaveRules
from ...spec.blocks import Block, Op
from ..table import Column
from .packed import runs_packed, saved_packed
from .saved import Kernels, Layout, Saved, block_input, kept_by, kernels_of, layouts, saved_by, size, total
from .scope import Scope, add_up, ceil_div
from .weights import local_elements


@dataclass(frozen=True)
class BlockBytes:
    """Columns for one layer and one micro-batch: `kept` between forward and backward, `full` without recomputation, `input` alone,
    `backward` the most that its backward holds (its own saved tensors, gradients, temporaries).
    """

    kept: Column
    full: Column
    input: Column
    backward: Column


def rules_of(scope: Scope) -> tuple[SaveRules, SaveRules | None]:
    memory = scope.framework.memory
    if memory.saves_parallel is not None and scope.structure.attention == "eager":  # the fused softmax of Megatron's layers
        return memory.saves_parallel, None
    return memory.saves, memory.saves_parallel


def by_kernels(scope: Scope) -> list[tuple[Kernels, Column]]:
    """The kernels that the plans run, each with the rows (as 1.0 and 0.0) that run them."""
    alone, parallel = rules_of(scope)
    if parallel is None:
        return [(kernels_of(scope, alone), np.ones(len(scope)))]
    split = np.where((scope.tp > 1) | (scope.pp > 1), 1.0, 0.0)
    found = [(kernels_of(scope, alone), 1.0 - split), (kernels_of(scope, parallel), split)]
    return [(k, rows) for k, rows in found if rows.any()]


def block_kept(block: Block, scope: Scope) -> Column:
    """`BlockBytes.kept` alone."""
    packed = runs_packed(scope)
    if packed.any():
        return block_bytes(block, scope).full
    found = (rows * total(kept_by(block, k, scope.structure, scope.framework.memory.selective), scope) for k, rows in by_kernels(scope))
    return add_up(found, len(scope))


def block_input_bytes(block: Block, scope: Scope) -> Column:
    """`BlockBytes.input` alone."""
    return add_up((rows * size(block_input(block, kernels), scope) for kernels, rows in by_kernels(scope)), len(scope))


def block_bytes(block: Block, scope: Scope) -> BlockBytes:
    """`BlockBytes` of a layer, each plan with its own kernels."""
    full, backward = np.zeros(len(scope)), np.zeros(len(scope))
    packed = runs_packed(scope)
    for kernels, every in by_kernels(scope):
        for everything, rows in ((saved_by(block, kernels), every * (1.0 - packed)), (saved_packed(block, kernels), every * packed)):
            if rows.any():
                full += rows * total(everything, scope)
                backward += rows * backward_peak(block, everything, kernels, scope)
    return BlockBytes(full if packed.any() else block_kept(block, scope), full, block_input_bytes(block, scope), backward)


def backward_peak(block: Block, everything: tuple[Saved, ...], kernels: Kernels, scope: Scope) -> Column:
    """Largest number of live bytes while a block's rows run backward, in reverse: a saved tensor goes after the first row that needed it;
    beside it live
    the residual's gradient, the row's incoming and outgoing gradients, and the weight gradient where no buffer takes it.
    """
    where = layouts(block, kernels.rules)
    sizes = [(s.first, size(s, scope)) for s in everything]
    x = size(block_input(block, kernels), scope)
    worst = np.zeros(len(scope))
    alive = add_up((column for _, column in sizes), len(scope)) + x
    for i in range(len(block.ops) - 1, -1, -1):
        worst = np.maximum(worst, alive + row_gradients(block.ops[i], where, kernels, scope))
        for first, column in sizes:
            if first == i:
                alive -= column
    return worst


def row_gradients(op: Op, where: dict[str, tuple[Layout, int]], kernels: Kernels, scope: Scope) -> Column:
    """Gradients of a row's output and inputs, and temporaries of its backward kernel."""

    def gradient(name: str, width: int = 0) -> Column:
        layout, found = where.get(name, ("sequence", width))
        return size(Saved(name, layout, float(found or width), kernels.c, 0), scope)

    if op.kind in ("add", "router", "rope", "cross_entropy"):
        return np.zeros(len(scope))
    out = gradient(op.output, op.width)
    inputs = sum((gradient(t) for t in dict.fromkeys(op.inputs)), np.zeros(len(scope)))
    extra = np.zeros(len(scope))
    if op.kind in ("linear", "grouped_linear") and not scope.framework.memory.accumulates_in_buffer and scope.job.method == "full":
        extra = kernels.c * sum((local_elements(w, scope) for w in op.weights), np.zeros(len(scope)))
    if kernels.method == "qlora" and op.kind in ("linear", "grouped_linear") and op.name != "lm_head":
        extra = kernels.c * sum((local_elements(w, scope) for w in op.weights), np.zeros(len(scope)))  # the dequantized weight
    if op.kind == "norm" and not kernels.rules.fused_norm and op.function.startswith("rms") and kernels.c == 2:
        extra = 8.0 * out  # fp32: g * x_hat, g * w, two products and mean's expansion, each twice the 16-bit size; pow
    if op.kind == "attention" and kernels.attention in ("eager", "sdpa-math"):
        heads = ceil_div(float(op.heads), scope.tp)
        scores = scope.b * heads * scope.rank_seq * float(scope.job.seq_len)
        extra = scores * (8 if kernels.rules.scores_fp32 else 2 * kernels.c)
    if op.kind == "attention":
        out = out + size(Saved("", "tensor", float(op.heads * op.head_dim), kernels.c, 0), scope)
    return out + inputs + extra


# ---- the loss


@dataclass(frozen=True)
class LossBytes:
    """`kept` from forward to the loss's backward, `forward` and `backward` the most beside everything else at those moments; `saved` the
    head's norm.
    """

    kept: Column
    forward: Column
    backward: Column
    saved: Column
    stale: Column


def loss_bytes(scope: Scope) -> LossBytes:
    """Logits and cross-entropy of one micro-batch on the rank that holds the head.

    plain: bf16 logits, their fp32 copy and the fp32 log-softmax; backward holds log-softmax, its gradient and that of the loss (12 bytes
    a logit).
    vocab-parallel and Megatron's kernel: fp32 exponentials in place of the logits and the 16-bit gradient (6 bytes).
    chunked: the fp32 log-softmax of all chunks, temporaries of one. fused (linear): one chunk of N h / V tokens, and gradients of the
    head's input and weight.
    """
    job, c, n = scope.job, scope.c, scope.tokens
    head_rows, nothing = saved_head(scope), np.zeros(len(scope))
    vocab = vocabulary(scope)
    split = ceil_div(vocab, scope.tp)
    kernel = scope.framework.memory.fused_loss == "kernel"
    if job.loss == "fused" and not kernel:
        chunks = np.maximum(ceil_div(vocab, float(scope.model.hidden)), 1)
        logits = ceil_div(n, chunks) * split
        weight = np.where(np.full(len(scope), job.method == "full"), c * split * scope.model.hidden, 0.0)
        gradients = n * scope.model.hidden * c + weight
        return LossBytes(gradients, gradients + (4 + c) * logits, gradients, head_rows, nothing)
    logits = n * split
    parallel = LossBytes(4 * logits, (4 + c) * logits, (4 + c) * logits, head_rows, nothing)
    if job.loss == "vocab-parallel" and scope.structure.framework in ("fsdp1", "fsdp2", "ddp"):
        return LossBytes(
            4 * logits, (8 + c) * logits, 16 * logits, head_rows, nothing
        )  # DTensor: zeros, exponentials and their sum beside it
    if job.loss == "vocab-parallel" or kernel:
        return parallel
    whole = n * vocab
    of_family = job.loss == "plain" and scope.model.family in scope.framework.memory.kernel_loss_families
    if of_family or compiles_loss(scope):  # one kernel reads the 16-bit logits, one writes their gradient
        return LossBytes(c * whole, c * whole, 2 * c * whole, head_rows, nothing)
    if job.loss == "chunked" and scope.structure.compile:  # each chunk compiled: 16-bit logits and gradients, fp32 of one chunk
        chunk = 4 * ceil_div(whole, job.loss_chunks)
        return LossBytes(c * whole, c * whole + chunk, 2 * c * whole + chunk, head_rows, nothing)
    if job.loss == "chunked":
        alone = LossBytes(4 * whole, (4 + c) * whole, 4 * whole + 8 * ceil_div(whole, job.loss_chunks), head_rows, nothing)
    else:
        holds = scope.framework.memory.holds_outputs
        piped = (scope.pp > 1) & (scope.framework.memory.engine == "tape")  # PyTorch's stages keep what they give
        held = np.where(piped | (holds == "live"), c, 0)
        stale = c if c == 2 and holds != "live" else 0
        date = scope.structure.framework_date
        if holds == "cached" and c == 2 and date is not None and date < "2024-09":
            stale += 4  # before transformers 4.45 the model itself cast its logits to fp32, and the output held those
        forward = np.maximum(8 + (c if c < 4 else 0), 8 + held)
        alone = LossBytes((4 + held) * whole, forward * whole, (12 + held) * whole, head_rows, stale * whole)
        packed = runs_packed(scope)
        if packed.any():  # head and loss in pieces of 128 tokens, in 16 bits; the list of logits lives until backward is over
            pieces = LossBytes(2 * c * whole, 2 * c * whole, 2 * c * whole, head_rows, nothing)
            alone = LossBytes(*(np.where(packed > 0, getattr(pieces, f.name), getattr(alone, f.name)) for f in fields(LossBytes)))
    if scope.framework.memory.saves_parallel is None:
        return alone
    megatron = (scope.tp > 1) | (scope.pp > 1)
    return LossBytes(*(np.where(megatron, getattr(parallel, f.name), getattr(alone, f.name)) for f in fields(LossBytes)))


def compiles_loss(scope: Scope) -> bool:
    since = scope.framework.memory.compiled_loss_since
    date = scope.structure.framework_date
    return scope.structure.compile and scope.job.loss == "plain" and bool(since) and (date is None or date >= since)


def vocabulary(scope: Scope) -> Column:
    """The vocabulary, padded as the framework pads it."""
    multiple = scope.framework.pad_vocab_multiple
    whole = float(scope.model.vocab)
    if multiple == 1:
        return np.full(len(scope), whole)
    return ceil_div(whole, multiple * scope.tp) * multiple * scope.tp


def logits_gradient(scope: Scope) -> Column:
    """The gradient of a micro-batch's logits, which the head's weight gradient is made of."""
    split = scope.job.loss == "vocab-parallel" or scope.framework.memory.fused_loss == "kernel"
    return scope.tokens * scope.c * (ceil_div(vocabulary(scope), scope.tp) if split else vocabulary(scope))


def saved_head(scope: Scope) -> Column:
    """What the final norm and the output projection save."""
    found = np.zeros(len(scope))
    for kernels, rows in by_kernels(scope):
        found = found + rows * total(tuple(s for s in saved_by(scope.model.head, kernels) if s.tensor != "logits"), scope)
    return found


def embedding_masks(scope: Scope) -> Column:
    """The dropout mask after the embedding, one byte an element."""
    return scope.sequence_tokens * scope.model.hidden * (1.0 if scope.job.dropout > 0 else 0.0)
