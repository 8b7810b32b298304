"""Masks and sentences about choices: batch and sharding, what a framework and a GPU can do, what has no effect.

Listed as rules in `trainwright.search.constraints`.
"""

from __future__ import annotations

from ..cost.table import PlanTable
from ..frameworks.dtypes import of_one_type
from ..sharding import SHARDINGS
from ..spec.plan import ParallelPlan, Structure
from ..spec.precision import activation_dtype
from .degrees import every
from .rules import Case, Mask

# --- batch and data parallelism ------------------------------------------------------------------------------------------------------


def batch(case: Case, s: Structure, t: PlanTable) -> Mask:
    return t.dp * t.micro_batch_size * t.accumulation == case.batch


def batch_says(case: Case, p: ParallelPlan) -> str:
    return f"dp {p.dp} x micro-batch {p.micro_batch_size} does not divide the global batch of {case.batch:,} sequences"


def sharding_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, s.sharding in case.framework(s).shardings)


def sharding_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} has no sharding {p.structure.sharding!r}; it has {', '.join(framework.shardings)}"


def _stage_of(s: Structure) -> int:
    return SHARDINGS[s.sharding].stage or 0


def unsharded(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.dp_shard == 1) | (s.sharding != "none")


def unsharded_says(case: Case, p: ParallelPlan) -> str:
    return f"sharding none keeps whole copies: dp_shard {p.dp_shard} has nothing to split (dp_replicate = {p.dp} says the same run)"


def nothing_to_shard(case: Case, s: Structure, t: PlanTable) -> Mask:
    """A single rank has ZeRO-1 where its optimizer may only move to the host with that."""
    framework = case.framework(s)
    alone = s.sharding == "none" or (s.sharding == "zero1" and bool(framework.offload_stages.get("optimizer-cpu")))
    return (t.dp_shard * (t.cp if framework.shards_over_cp else 1) > 1) | alone


def nothing_says(case: Case, p: ParallelPlan) -> str:
    return f"sharding {p.structure.sharding} over 1 rank splits nothing: the same as none"


def zero_pipeline(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.pp == 1) | (_stage_of(s) <= case.framework(s).pipeline_zero_stage)


def zero_pipeline_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} runs its pipeline with ZeRO stage {framework.pipeline_zero_stage} at most, not {p.structure.sharding} with pp {p.pp}"


def zero1_experts(case: Case, s: Structure, t: PlanTable) -> Mask:
    """ZeroRedundancyOptimizer sends every updated tensor to all data ranks, which hold other experts."""
    return (t.ep == 1) if (s.framework, s.sharding) == ("ddp", "zero1") else every(t, True)


def zero1_experts_says(case: Case, p: ParallelPlan) -> str:
    return f"ZeroRedundancyOptimizer shares weights among all data ranks, and ep {p.ep} gives them different experts"


def offload_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, s.offload in case.framework(s).offloads)


def offload_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} cannot offload {p.structure.offload}; it can {', '.join(framework.offloads)}"


def offload_stage(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, _stage_of(s) >= case.framework(s).offload_stages.get(s.offload, 0))


def offload_stage_says(case: Case, p: ParallelPlan) -> str:
    least = case.framework(p.structure).offload_stages.get(p.structure.offload, 0)
    return f"offload {p.structure.offload} works from ZeRO stage {least} on, not with sharding {p.structure.sharding}"


def whole_gradients(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, of_one_type(case.job) or s.sharding != "none" or case.framework(s).mixes_whole_gradients)


def whole_gradients_says(case: Case, p: ParallelPlan) -> str:
    own = activation_dtype(case.job.precision)
    return f"{case.framework(p.structure).title} has {own} gradients of {own} weights without ZeRO, not {case.job.gradient_dtype} (training.gradient_dtype)"


def step_in_backward(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.accumulation == 1) | (not case.job.optimizer_in_backward)


def step_in_backward_says(case: Case, p: ParallelPlan) -> str:
    return f"optimizer_in_backward uses each gradient at once: {p.accumulation} micro-batches cannot accumulate"


# --- hardware ------------------------------------------------------------------------------------------------------------------------


def low_precision(case: Case, s: Structure, t: PlanTable) -> Mask:
    formats = case.cluster.gpu.peak_flops
    return every(t, case.job.precision not in ("fp8", "fp4") or bool(formats.get(case.job.precision)))


def half_precision(case: Case, s: Structure, t: PlanTable) -> Mask:
    formats = case.cluster.gpu.peak_flops
    return every(t, case.job.precision not in ("bf16", "fp16") or bool(formats.get(case.job.precision)))


def formats(case: Case, p: ParallelPlan) -> str:
    has = ", ".join(f for f in ("fp32", "fp16", "bf16", "fp8", "fp4") if case.cluster.gpu.peak_flops.get(f))
    return f"{case.cluster.gpu.id} has no {case.job.precision} matrix units; it has {has}"


def _compute_capability(case: Case) -> float:
    """NVIDIA's compute capability, infinity for other vendors' devices."""
    try:
        return float(case.cluster.gpu.arch) if case.cluster.gpu.vendor == "NVIDIA" else float("inf")
    except ValueError:
        return float("inf")


def flash(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, s.attention != "flash" or _compute_capability(case) >= 8.0)


def flash_says(case: Case, p: ParallelPlan) -> str:
    return f"FlashAttention-2 needs an Ampere GPU or newer; {case.cluster.gpu.id} is compute capability {case.cluster.gpu.arch}"


def tp_scaleup(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (case.scaleup % t.tp == 0) | (t.tp == 1)


def tp_scaleup_says(case: Case, p: ParallelPlan) -> str:
    size = case.scaleup
    if p.tp > size:
        return f"tp {p.tp} leaves the {size} GPUs that {case.cluster.gpu.link or 'the fast link'} joins: its collectives in every layer would cross the network"
    return f"tp {p.tp} does not divide the {size} GPUs of a node: some groups would cross the network"


TILE = 128  # rows of a matrix product that a thread block computes at least (CUTLASS, cuBLAS: tiles of 64 to 256 by 128)


def tile(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.cp == 1) | (t.micro_batch_size * case.job.seq_len >= TILE * t.cp)


def tile_says(case: Case, p: ParallelPlan) -> str:
    tokens = p.micro_batch_size * case.job.seq_len // p.cp
    return f"cp {p.cp} leaves {tokens} tokens of a micro-batch to a rank, less than the {TILE} rows of one tile of a matrix product"


# --- options without effect ----------------------------------------------------------------------------------------------------------


def sp_tp(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.tp > 1) | (not s.sequence_parallel)


def async_tp(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.tp > 1) | (not s.async_tp)


def modules(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, not s.recompute_modules or s.recompute == "selective")


def fp8_params(case: Case, s: Structure, t: PlanTable) -> Mask:
    return every(t, not s.fp8_params or case.job.precision in ("fp8", "fp4"))
