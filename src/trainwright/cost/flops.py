"""Matrix products of a model as (m, n, k, count), and the FLOPs of a step by each published convention.

A product y[m, n] = x[m, k] w[k, n] costs 2 m n k. Backward runs two of the same size, for the input's gradient (m, k, n) and the weight's
(k, n, m), so forward + backward is three times forward. Attention is counted by the pairs (query, key) that the mask lets through; a causal mask
over s tokens is counted as half of the square, s^2/2 (Dao, arXiv:2307.08691, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import unknown
from ..frameworks import FRAMEWORKS
from ..spec.blocks import Block, Op
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan, Structure
from .table import Column, PlanTable

CONVENTIONS = ("contract", "megatron", "palm", "6N")


@dataclass(frozen=True)
class Shares:
    """What one rank sees of a micro-batch; columns with one entry a plan.

    `tokens` = micro_batch_size x seq_len / cp. `sequences` = micro_batch_size. Expert weights are split ep ways by expert and etp ways inside an
    expert; the tokens of tp x cp x ... ranks meet there, so that each rank's experts see tokens x tp / etp x top_k tokens in the mean.
    """

    tokens: Column
    sequences: Column
    tp: Column
    cp: Column
    ep: Column
    etp: Column
    sequence_parallel: bool

    def region(self, op: Op) -> Column:
        """Elements of the op's output on this rank: width x tokens, divided as its region is."""
        width = float(op.width)
        copies = op.top_k if op.kind in ("grouped_linear", "dispatch") or (op.experts and op.kind in ("activation", "multiply")) else 1
        if op.region == "tensor":
            split = self.etp if op.experts else self.tp
            tokens = self.expert_tokens if op.experts else self.tokens
            return width * copies * tokens / split
        return width * copies * (self.tokens / self.tp if self.sequence_parallel else self.tokens)

    @property
    def expert_tokens(self) -> Column:
        """Tokens of this rank's part of the sequence that are routed, before their top_k copies: each of tp ranks sends its share to etp ranks."""
        return self.tokens * self.etp / self.tp


@dataclass(frozen=True)
class Product:
    """One kind of product of a block in forward: y[m, n] = x[m, k] w[k, n], `count` times a micro-batch on one rank.

    `kind`: linear | grouped (one product an expert) | router. `trained`: the weight gets a gradient.
    """

    name: str
    kind: str
    m: Column
    n: Column
    k: Column
    count: Column
    source: str = ""  # the tensor that enters
    trained: bool = True

    @property
    def flops(self) -> Column:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Attention:
    """Core attention of a block on one rank: `pairs` (query, key) that the mask lets through, summed over sequences, per head; `heads` of this rank."""

    name: str
    pairs: Column
    heads: Column
    head_dim: int
    v_head_dim: int
    reach: float  # tokens between a query's first and last key: the document's or window's length

    @property
    def flops(self) -> Column:
        """Forward: q k^T and p v."""
        return 2.0 * self.pairs * self.heads * (self.head_dim + self.v_head_dim)


def products(block: Block, shares: Shares, *, fuse: bool = False) -> list[Product]:
    """The products of one block in forward, row by row. `fuse`: products with the same input run as one (q, k, v; gate and up)."""
    found: list[Product] = []
    for op in block.ops:
        made = _product(op, shares)
        if made is None:
            continue
        last = found[-1] if found else None
        if fuse and last is not None and last.source == made.source and last.kind == made.kind == "linear" and op.parallel == "column":
            found[-1] = Product(f"{last.name}+{made.name}", "linear", last.m, last.n + made.n, last.k, last.count, last.source)
        elif fuse and last is not None and last.source == made.source and last.kind == made.kind == "grouped":
            found[-1] = Product(f"{last.name}+{made.name}", "grouped", last.m, last.n + made.n, last.k, last.count, last.source)
        else:
            found.append(made)
    return found


def _product(op: Op, s: Shares) -> Product | None:
    one = np.ones_like(s.tokens)
    source = op.inputs[0] if op.inputs else ""
    if op.kind == "linear":
        n, k = op.width * one, op.k * one
        tokens = s.tokens
        if op.parallel == "column" or (not op.weights and op.region == "tensor"):
            n = n / s.tp
        elif op.parallel == "row":
            k = k / s.tp
        elif s.sequence_parallel and op.region == "sequence":
            tokens = tokens / s.tp
        return Product(op.name, "linear", tokens, n, k, one, source)
    if op.kind == "grouped_linear":
        local = np.maximum(op.experts / s.ep, 1.0)
        rows = s.expert_tokens * op.top_k / local
        column = op.parallel == "column"
        n = op.width * one / (s.etp if column else 1.0)
        k = op.k * one / (1.0 if column else s.etp)
        return Product(op.name, "grouped", rows, n, k, local, source)
    if op.kind == "router":
        tokens = s.tokens / s.tp if s.sequence_parallel else s.tokens
        return Product(op.name, "router", tokens, op.width * one, op.k * one, one, source)
    return None


def attention(block: Block, shares: Shares, job: TrainingJob) -> list[Attention]:
    """The attention cores of one block on one rank; context parallelism shares the pairs evenly (zig-zag order)."""
    found = []
    for op in block.rows("attention"):
        pairs = causal_pairs(document_length(job), op.window) * (job.seq_len / document_length(job))
        reach = float(min(document_length(job), op.window or document_length(job)))
        per_rank = shares.sequences * pairs / shares.cp
        found.append(Attention(op.name, per_rank, op.heads / shares.tp, op.head_dim, op.v_head_dim or op.head_dim, reach))
    for op in block.rows("linear_attention"):  # state update, read and correction: 3 products of head_dim x v_head_dim a token
        per_rank = 3.0 * shares.tokens
        heads = op.heads / shares.tp
        found.append(Attention(op.name, per_rank * op.v_head_dim, heads, op.head_dim, 0, float(job.seq_len)))
    return found


def document_length(job: TrainingJob) -> float:
    """Tokens that attend to each other: the sequence, or a document of it where samples are packed behind a block-diagonal mask."""
    if job.packing and job.mean_document_len:
        return float(min(job.mean_document_len, job.seq_len))
    return float(job.seq_len)


def causal_pairs(length: float, window: int | None = None) -> float:
    """Pairs of a causal mask over `length` tokens, counted as half of the square; with a window of w keys: w s - w^2/2."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


@lru_cache(maxsize=1024)
def _whole(tokens: float, sequences: float) -> Shares:
    one = np.ones(1)
    return Shares(one * tokens, one * sequences, one, one, one, one, False)


def forward_flops(block: Block, job: TrainingJob, *, causal_half: bool = True) -> float:
    """FLOPs of one forward pass of one block over one whole sequence."""
    shares = _whole(float(job.seq_len), 1.0)
    linear = sum(float(p.flops[0]) for p in products(block, shares))
    core = sum(float(a.flops[0]) for a in attention(block, shares, job))
    return linear + core * (1.0 if causal_half else 2.0)


def model_flops(model: ModelSpec, job: TrainingJob, *, causal_half: bool = True) -> float:
    """FLOPs of one step by the contract: three times the forward pass of every matrix product, attention included, no recomputation.

    Multi-token-prediction layers are trained with the model and counted, each with a pass through the output projection. A method that freezes the
    base (LoRA) has no weight gradients there: twice the forward pass plus three times that of the adapters.
    """
    layers = sum(n * forward_flops(block, job, causal_half=causal_half) for block, n in model.counts)
    ends = forward_flops(model.head, job)
    extra = sum(forward_flops(block, job, causal_half=causal_half) + _head_pass(model, block, job) for block in model.mtp)
    forward = layers + ends + extra
    if job.method == "full":
        return 3.0 * forward * job.global_batch_size
    core = sum(n * sum(float(a.flops[0]) for a in attention(b, _whole(float(job.seq_len), 1.0), job)) for b, n in model.counts)
    adapters = 6.0 * lora_parameters(model, job) * job.seq_len
    return (2.0 * forward + core + adapters) * job.global_batch_size


def _head_pass(model: ModelSpec, block: Block, job: TrainingJob) -> float:
    has_head = any(op.kind == "linear" and op.width == model.vocab for op in block.ops)
    return 0.0 if has_head else forward_flops(model.head, job)


def lora_parameters(model: ModelSpec, job: TrainingJob) -> int:
    """Elements of the adapters: rank x (k + n) for each target product (arXiv:2106.09685)."""
    if job.method == "full":
        return 0
    total = 0
    for block, n in model.counts:
        for op in block.rows("linear", "grouped_linear"):
            if op.name in job.lora_targets:
                total += n * job.lora_rank * (op.k + op.width) * max(op.experts, 1)
    return total


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step of all GPUs together, one entry a plan: by the contract's convention, and with what recomputation repeats."""

    model: Column
    hardware: Column


def recomputed_flops(model: ModelSpec, job: TrainingJob, structure: Structure) -> float:
    """Matrix-product FLOPs that a step repeats: by the recompute mode and what the framework means by it."""
    if structure.recompute == "none":
        return 0.0
    rules = FRAMEWORKS[structure.framework].time
    shares = _whole(float(job.seq_len), 1.0)
    total = 0.0
    for block, n in model.counts:
        linear = products(block, shares)
        core = sum(float(a.flops[0]) for a in attention(block, shares, job))
        if structure.recompute == "full":
            again = core + sum(float(p.flops[0]) for p in linear[: -1 if rules.checkpoint_stops_early else None])
        elif structure.recompute_modules or rules.selective == "core_attn":
            modules = structure.recompute_modules or ("core_attn",)
            again = sum(float(p.flops[0]) for p in linear if any(in_module(p.name, p.kind, m) for m in modules))
            again += core if "core_attn" in modules else 0.0
        else:
            again = 0.5 * sum(float(p.flops[0]) for p in linear)
        total += n * again
    return total * job.global_batch_size


def in_module(name: str, kind: str, module: str) -> bool:
    """Whether a product belongs to one of Megatron's `recompute_modules`; the last product of a module is never repeated."""
    if "down" in name or name in ("fc2", "c_proj"):
        return False
    if module == "mla_up_proj":
        return "_b_proj" in name
    if module == "mlp":
        return kind == "linear" and any(w in name for w in ("gate_proj", "up_proj", "fc1", "c_fc")) and "shared" not in name
    if module == "moe":
        return kind == "grouped"
    return module == "shared_experts" and "shared" in name


def flops(model: ModelSpec, job: TrainingJob, plans: PlanTable) -> Flops:
    """Model and hardware FLOPs of every plan of a table."""
    useful = model_flops(model, job)
    whole = np.full(len(plans), useful)
    hardware = whole.copy()
    for structure, rows in plans.by_structure():
        hardware[rows] += recomputed_flops(model, job, structure)
    return Flops(whole, hardware)


def conventions(model: ModelSpec, job: TrainingJob, plan: ParallelPlan, name: str = "contract") -> float:
    """FLOPs of one step by the convention of that name.

    * ``contract``  every matrix product forward + backward, causal attention as half of the square
    * ``megatron``  the same with the whole square, and the recomputed forward pass with full recomputation: for a GPT
      96 B s l h^2 (1 + s/6h + V/16lh) with and 72 B s l h^2 (1 + s/6h + V/12lh) without (arXiv:2104.04473, equation 3; arXiv:2205.05198, appendix A)
    * ``palm``      (6 N + 12 L H Q T) a token, N without the input embedding (arXiv:2204.02311, appendix B)
    * ``6N``        6 x active parameters a token (arXiv:2001.08361)
    """
    if name not in CONVENTIONS:
        raise unknown("FLOPs convention", name, CONVENTIONS)
    if name == "6N":
        return 6.0 * model.active_parameters * job.tokens_per_step
    if name == "palm":
        matrices = model.active_parameters - model.embedding.parameters
        if model.tied:
            matrices += model.vocab * model.hidden
        core = sum(n * op.heads * op.head_dim for block, n in model.counts for op in block.rows("attention"))
        return (6.0 * matrices + 12.0 * core * job.seq_len) * job.tokens_per_step
    total = model_flops(model, job, causal_half=name == "contract")
    if name == "megatron" and plan.structure.recompute == "full":
        total += sum(n * forward_flops(block, job, causal_half=False) for block, n in model.counts) * job.global_batch_size
    return total
