"""Bytes that memory-bound kernels of a block move, derived from its rows: how often each tensor is read and written, by how the framework fuses.

A pass is one read or one write of a tensor. `kernels.toml` [passes.*] says how many passes each kind of row costs forward and backward. Tokens on their way
to experts are permuted before they leave (read, write), sorted by expert where they arrive, sorted back, and summed up at home (top_k reads, one
write): Megatron-Core moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..spec.blocks import Block, Op
from ..spec.job import TrainingJob
from ..spec.precision import activation_bytes
from .flops import Shares, attention
from .kernels import Constants, constants
from .table import Column


@dataclass(frozen=True)
class Elementwise:
    """Bytes moved forward and backward by one block for one micro-batch, and how many kernels are launched forward."""

    forward: Column
    backward: Column
    kernels: int


GROUPS = {"norm": "norms", "activation": "activation", "multiply": "activation"}


def elementwise(block: Block, shares: Shares, job: TrainingJob, fusion: str, table: Constants) -> dict[str, Elementwise]:
    """Bytes by group: norms, activation, routing, and the rest. `fusion`: fused | compiled | eager (sections of [passes])."""
    passes = table["passes"][fusion]
    counted = constants()["passes"][fusion]  # measured passes say how long, not how many kernels
    size = float(activation_bytes(job.precision))
    found: dict[str, Elementwise] = {}
    for op in block.ops:
        f, b, count = _passes(op, block, passes)
        if passes is not counted:
            count = _passes(op, block, counted)[2]
        if not (f or b or count):
            continue
        group = GROUPS.get(op.kind, "sums, rope, biases")
        if group == "activation" and op.experts:
            group = "expert activation"
        moved = shares.region(op) * size
        if op.kind in ("dispatch", "combine"):  # sorted by expert after they have arrived, and back again before they leave
            arrived = op.width * op.top_k * shares.expert_tokens * size
            found["routing"] = _plus(found.get("routing"), f * moved + 2.0 * arrived, b * moved + 2.0 * arrived, count)
            continue
        found[group] = _plus(found.get(group), f * moved, b * moved, count)
    return found


def _plus(old: Elementwise | None, forward: Column, backward: Column, kernels: int) -> Elementwise:
    if old is None:
        return Elementwise(forward, backward, kernels)
    return Elementwise(old.forward + forward, old.backward + backward, old.kernels + kernels)


def score_softmax(block: Block, shares: Shares, job: TrainingJob, kind: str, table: Constants) -> Elementwise | None:
    """What scale, mask, softmax and dropout move where attention scores are materialized; the mask is applied, not skipped, so the square is whole."""
    cores = attention(block, shares, job)
    if not cores:
        return None
    per = table["scores"][kind]
    square = sum((2.0 * core.pairs * core.heads for core in cores), np.zeros_like(shares.tokens))
    unit = activation_bytes(job.precision) / 2.0
    return Elementwise(per[0] * square * unit, per[1] * square * unit, 4 * len(cores))


def _passes(op: Op, block: Block, passes: Constants) -> tuple[float, float, int]:
    """(forward, backward) passes of an op's output, and its kernels."""
    if op.kind == "norm":
        f, b = passes.get("rms", passes["norm"]) if op.function.startswith("rms") else passes["norm"]
        return f, b, 1 if f <= 3 else 6
    if op.kind in ("activation", "add", "rope", "embedding"):
        if op.kind == "activation" and _feeds_multiply(op, block):
            return 0.0, 0.0, 0
        f, b = passes[op.kind]
        return f, b, 1 if f <= 3 else 8
    if op.kind == "multiply":
        f, b = (
            passes["gated"]
            if any(_feeds_multiply(a, block) and a.output in op.inputs for a in block.rows("activation"))
            else passes["multiply"]
        )
        return f, b, 1 if f <= 3 else 2
    if op.kind in ("linear", "grouped_linear"):
        biased = any(len(w.shape) == (1 if op.kind == "linear" else 2) for w in op.weights)
        f, b = passes["bias"] if biased else (0.0, 0.0)
        return f, b, 1
    if op.kind == "dispatch":
        return 2.0, 2.0, 4
    if op.kind == "combine":
        return op.top_k + 1.0, op.top_k + 1.0, 4
    if op.kind == "router":
        return 8.0, 8.0, 8
    return 0.0, 0.0, 1


def _feeds_multiply(op: Op, block: Block) -> bool:
    return any(op.output in other.inputs for other in block.rows("multiply"))


def product_input_elements(block: Block, shares: Shares) -> Column:
    """Elements that enter the products of a block: what an 8-bit recipe quantizes, each input once where products share it."""
    seen: set[str] = set()
    total = np.zeros_like(shares.tokens)
    for op in block.ops:
        if op.kind in ("linear", "grouped_linear") and op.inputs[0] not in seen:
            seen.add(op.inputs[0])
            copies = float(op.top_k) if op.kind == "grouped_linear" else 1.0
            split = (shares.etp if op.kind == "grouped_linear" else shares.tp) if op.parallel == "row" else 1.0
            tokens = shares.expert_tokens if op.kind == "grouped_linear" else shares.tokens
            total = total + op.k * copies * tokens / split
    return total


def product_output_elements(block: Block, shares: Shares) -> Column:
    """Elements of the products' outputs, whose gradients an 8-bit recipe quantizes in backward."""
    total = np.zeros_like(shares.tokens)
    for op in block.rows("linear", "grouped_linear"):
        copies = float(op.top_k) if op.kind == "grouped_linear" else 1.0
        split = (shares.etp if op.kind == "grouped_linear" else shares.tp) if op.parallel == "column" else 1.0
        tokens = shares.expert_tokens if op.kind == "grouped_linear" else shares.tokens
        total = total + op.width * copies * tokens / split
    return total
