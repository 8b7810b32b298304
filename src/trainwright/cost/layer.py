"""Seconds of one block for one micro-batch on one rank, as named parts: products, attention, memory-bound kernels, casts, loss, gradient sums.

Every part has forward and backward seconds of the GPU, and the host's launches beside them; recomputation is a selection of the forward parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..frameworks import FRAMEWORKS
from ..frameworks.base import TimeRules
from ..frameworks.dtypes import dtypes
from ..spec.blocks import Block
from ..spec.job import TrainingJob
from ..spec.plan import Structure
from ..spec.precision import activation_dtype
from .adapters import adapter_parts
from .elementwise import Elementwise, elementwise, product_input_elements, product_output_elements, score_softmax
from .flops import Product, Shares, attention, document_length, in_module, products
from .kernels import Constants, Rates, attention_seconds, matmul_seconds
from .parts import Part
from .table import Column


@dataclass(frozen=True)
class BlockTime:
    """Sums over the parts of a block; columns in seconds a micro-batch. `kernels` is launches of a forward pass, for the host's part."""

    parts: tuple[Part, ...]
    forward: Column
    backward: Column
    recompute: Column
    weight: Column  # the weight gradients' products, part of `backward`
    kernels: float
    recompute_kernels: Column
    experts: Column  # local experts, 0 without


def block_time(
    block: Block,
    shares: Shares,
    job: TrainingJob,
    structure: Structure,
    rules: TimeRules,
    rate: Rates,
    table: Constants,
    *,
    end: bool = False,
) -> BlockTime:
    """`end`: embedding or head, which no mode recomputes and no 8-bit recipe quantizes."""
    precision = activation_dtype(job.precision) if end else job.precision
    own_code = job.method == "full" and not (rules.eager_when_sharded and structure.sharding in ("zero2", "zero3"))
    fusion = "compiled" if structure.compile and rules.compiles else rules.fusion if own_code else "eager"
    scores = (
        ""
        if structure.attention in ("flash", "efficient")
        else ("fused" if rules.fusion == "fused" and structure.attention == "eager" else "eager")
    )
    parts = [_product_part(p, rate, precision, job) for p in products(block, shares, fuse=rules.fuses_projections)]
    parts += _attention_parts(block, shares, job, scores, rate)
    moved = elementwise(block, shares, job, fusion, table)
    softmax = score_softmax(block, shares, job, scores, table) if scores else None
    if softmax:
        moved["score softmax"] = softmax
    extra, launches = ([], 0) if end else adapter_parts(block, shares, job, rate)
    parts += extra
    kernels = float(launches + sum(e.kernels for e in moved.values()))
    parts += [_bound(name, e, rate) for name, e in moved.items()]
    if precision in ("fp8", "fp4"):
        parts.append(_casts(block, shares, job, rules, rate, table))
    if block.rows("cross_entropy"):
        parts.append(_loss(block, shares, job, structure, rate, table))
    parts.append(_gradients(block, shares, job, structure, rules, rate))
    forward = sum((p.forward for p in parts), np.zeros_like(shares.tokens))
    backward = sum((p.backward for p in parts), np.zeros_like(shares.tokens))
    again, share = (0.0 * forward, 0.0 * forward) if end else recomputed(parts, structure, rules)
    experts = np.zeros_like(shares.tokens)
    for op in block.rows("grouped_linear"):
        experts = np.maximum(op.experts / shares.ep, 1.0)
    weight = sum((0.5 * p.backward for p in parts if p.kind in ("product", "grouped")), np.zeros_like(forward)) * float(
        job.method == "full"
    )
    return BlockTime(tuple(parts), forward, backward, again, weight, kernels, kernels * share, experts)


def _bound(name: str, moved: Elementwise, rate: Rates) -> Part:
    numbers = {"forward_bytes": moved.forward, "backward_bytes": moved.backward}
    formula = "bytes read and written / (bandwidth x share)"
    return Part(name, "elementwise", moved.forward / rate.bytes_per_s, moved.backward / rate.bytes_per_s, formula, numbers)


def _product_part(p: Product, rate: Rates, precision: str, job: TrainingJob) -> Part:
    kind = "bf16" if p.kind == "router" else precision
    forward = matmul_seconds(p.m, p.n, p.k, p.count, rate, kind)
    backward = matmul_seconds(p.m, p.k, p.n, p.count, rate, kind)
    trained = job.method == "full"
    if trained:
        backward = backward + matmul_seconds(p.n, p.k, p.m, p.count, rate, kind)
    formula = "launch + max(units x rounds of tiles x 2 tile (k/split + ramp) x alignment / sustained, bytes / bandwidth)"
    return Part(
        p.name,
        "grouped" if p.kind == "grouped" else "product",
        forward,
        backward,
        formula,
        {"m": p.m, "n": p.n, "k": p.k, "count": p.count},
    )


def _attention_parts(block: Block, shares: Shares, job: TrainingJob, scores: str, rate: Rates) -> list[Part]:
    found = []
    for core in attention(block, shares, job):
        numbers = {"pairs": core.pairs, "heads": core.heads}
        if not scores:
            seconds = attention_seconds(core.flops, core.reach, min(core.head_dim, core.v_head_dim or core.head_dim), rate)
            formula = f"2 pairs heads (head_dim + v_head_dim) / rate(kernel, length, head size); backward {rate.attention_backward:g} times"
            found.append(Part(core.name, "attention", seconds, rate.attention_backward * seconds, formula, numbers))
            continue
        length = np.full_like(core.heads, document_length(job))
        count = 2.0 * core.pairs / length**2 * core.heads
        size = np.full_like(length, float(core.head_dim))
        kind = (rate, job.precision, "unaligned_batched")
        one = matmul_seconds(length, length, size, count, *kind) + matmul_seconds(length, size, length, count, *kind)
        found.append(Part(core.name, "scores", one, 2.0 * one, "two batched products over the whole square; backward four", numbers))
    return found


def _casts(block: Block, shares: Shares, job: TrainingJob, rules: TimeRules, rate: Rates, table: Constants) -> Part:
    recipe = "fp4" if job.precision == "fp4" else job.fp8_recipe or rules.default_fp8_recipe
    per = table["casts"][recipe]
    inputs, outputs = product_input_elements(block, shares), product_output_elements(block, shares)
    formula = "bytes an element of the recipe x elements / bandwidth"
    return Part(
        "casts", "casts", per * inputs / rate.bytes_per_s, per * outputs / rate.bytes_per_s, formula, {"inputs": inputs, "outputs": outputs}
    )


def _loss(block: Block, shares: Shares, job: TrainingJob, structure: Structure, rate: Rates, table: Constants) -> Part:
    """Every rank's part of the vocabulary; PyTorch's tensor parallelism gathers the logits for any loss but ``vocab-parallel``, and each rank takes all."""
    per = table["loss"][job.loss]
    whole = structure.framework in ("fsdp2", "ddp") and job.loss != "vocab-parallel"
    split = 1.0 if whole else shares.tp
    logits = sum((op.width * shares.tokens / split for op in block.rows("cross_entropy")), np.zeros_like(shares.tokens))
    seconds = per * logits / rate.bytes_per_s
    return Part("loss", "loss", 0.5 * seconds, 0.5 * seconds, "bytes a logit x logits / bandwidth", {"logits": logits})


def local_parameters(block: Block, shares: Shares) -> Column:
    """Parameters of a block on one rank before data-parallel sharding."""
    total = np.zeros_like(shares.tokens)
    for op in block.ops:
        for w in op.weights:
            split: Column | float = 1.0
            if w.tp_dim is not None and not (w.tp_needs_sp and not shares.sequence_parallel):
                split = shares.etp if w.ep_dim is not None else shares.tp
            if w.ep_dim is not None:
                split = split * shares.ep
            total = total + w.elements / split
    return total


def _gradients(block: Block, shares: Shares, job: TrainingJob, structure: Structure, rules: TimeRules, rate: Rates) -> Part:
    """Summing weight gradients over micro-batches: read and written once each where the product's epilogue does it, else read twice more."""
    size = float(dtypes(FRAMEWORKS[structure.framework], job, structure, alone=False).reduced)
    bytes_each = (2.0 * size if rules.fuses_gradient_sum else 4.0 + 2.0 * size) if job.method == "full" else 0.0
    if structure.sharding == "zero3":
        bytes_each += rules.gather_copy_bytes
    parameters = local_parameters(block, shares)
    seconds = bytes_each * parameters / rate.bytes_per_s
    return Part(
        "gradient sum", "gradients", 0.0 * seconds, seconds, "bytes a parameter x parameters / bandwidth", {"parameters": parameters}
    )


def _in_module(part: Part, module: str) -> bool:
    if part.kind in ("product", "grouped"):
        return in_module(part.name, {"product": "linear"}.get(part.kind, part.kind), module)
    return {
        "core_attn": part.kind in ("attention", "scores") or part.name == "score softmax",
        "layernorm": part.name == "norms",
        "moe": part.name == "expert activation",
        "moe_act": part.name == "expert activation",
        "mlp": part.name == "activation",
    }.get(module, False)


def recomputed(parts: Sequence[Part], structure: Structure, rules: TimeRules) -> tuple[Column, Column]:
    """(seconds that recomputation repeats, their share of the forward pass).

    full: the forward pass, without its last product where the checkpoint stops early (non-reentrant `torch.utils.checkpoint`). selective: what the
    framework means by it, the named modules, or every second product with the memory-bound kernels (torchtitan).
    """
    forward = [p for p in parts if p.kind != "gradients"]
    total: Column = sum((p.forward for p in forward), np.zeros_like(forward[0].forward))
    if structure.recompute == "none":
        return 0.0 * total, 0.0 * total
    if structure.recompute == "full":
        again = total
        if rules.checkpoint_stops_early:
            last = [p for p in forward if p.kind in ("product", "grouped")][-1]
            again = total - last.forward
        return again, again / total
    again = 0.0 * forward[0].forward
    if rules.selective == "every-second-product" and not structure.recompute_modules:
        again = (
            again
            + 0.5 * sum(p.forward for p in forward if p.kind == "product")
            + sum(p.forward for p in forward if p.kind == "elementwise")
        )
        return again, again / total
    for module in structure.recompute_modules or ("core_attn",):
        again = again + sum((p.forward for p in forward if _in_module(p, module)), 0.0 * again)
    return again, again / total
