"""Every constraint on a layout, one entry each: a sentence for a person and a mask over columns for the search.

`check_plan` refuses a plan that cannot run; `advise` lists what would run but be pointless or slow; `trainwright.search.space` applies the same masks to
millions of rows. To add a constraint, add an entry to `RULES`.
"""

from __future__ import annotations

import numpy as np

from ..cost.table import IntColumn, PlanTable
from ..errors import SpecError
from ..schedules import SCHEDULES
from ..sharding import SHARDINGS
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan, Structure
from .rules import Case, Mask, Rule, Violation, explain, mask

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def _all(table: PlanTable, value: bool) -> Mask:
    return np.full(len(table), value)


def _divides(column: IntColumn, totals: tuple[int, ...]) -> Mask:
    good = np.ones(len(column), dtype=bool)
    for total in totals:
        good &= total % column == 0
    return good


def _list(numbers: tuple[int, ...]) -> str:
    return " and ".join(f"{n:,}" for n in numbers)


# --- degrees and the model -----------------------------------------------------------------------------------------------------------


def _gpus(case: Case, s: Structure, t: PlanTable) -> Mask:
    return t.gpus == case.cluster.gpus


def _gpus_says(case: Case, p: ParallelPlan) -> str:
    return f"dp {p.dp} x tp {p.tp} x pp {p.pp} x cp {p.cp} = {p.gpus:,}, but the cluster has {case.cluster.gpus:,} GPUs"


def _axes(case: Case, s: Structure, t: PlanTable) -> Mask:
    offered = case.framework(s).axes
    good = np.ones(len(t), dtype=bool)
    for axis in AXES:
        if axis not in offered:
            good &= getattr(t, axis) == 1
    return good


def _axes_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    wrong = [f"{a} = {getattr(p, a)}" for a in AXES if a not in framework.axes and getattr(p, a) > 1]
    return f"{framework.title} has no axis for {' and '.join(wrong)}; it offers {', '.join(framework.axes)}"


def _tp_heads(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _divides(t.tp, case.heads)


def _kv(case: Case, s: Structure, t: PlanTable) -> Mask:
    good = np.ones(len(t), dtype=bool)
    for heads in case.kv_heads:
        fits = heads % t.tp == 0
        good &= fits | (t.tp % heads == 0) if case.framework(s).replicates_kv_heads else fits
    return good


def _kv_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    also = "nor a multiple of them" if framework.replicates_kv_heads else f"and {framework.title} does not replicate them"
    return f"tp {p.tp} does not divide {_list(case.kv_heads)} key-value heads, {also}"


def _etp_dense(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _divides(t.etp, case.expert_widths) if case.experts else t.etp == 1


def _etp_says(case: Case, p: ParallelPlan) -> str:
    if not case.experts:
        return f"etp {p.etp} splits experts, and the model has none"
    return f"etp {p.etp} does not divide the experts' width {_list(case.expert_widths)}"


def _ep_experts(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _divides(t.ep, case.experts) if case.experts else t.ep == 1


def _ep_says(case: Case, p: ParallelPlan) -> str:
    if not case.experts:
        return f"ep {p.ep} spreads experts, and the model has none"
    return f"ep {p.ep} does not divide {_list(case.experts)} experts"


def _ep_ranks(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.dp * t.cp * t.tp) % (t.ep * t.etp) == 0


def _ep_ranks_says(case: Case, p: ParallelPlan) -> str:
    return f"ep {p.ep} x etp {p.etp} does not divide dp {p.dp} x cp {p.cp} x tp {p.tp} = {p.dp * p.cp * p.tp}, whose ranks hold the experts"


def _cp(case: Case, s: Structure, t: PlanTable) -> Mask:
    seq = case.job.seq_len
    if s.cp_kind == "ulysses":
        good = seq % t.cp == 0
        for heads in case.heads:
            good &= (heads % t.tp != 0) | (heads // t.tp % t.cp == 0)
    else:
        good = seq % (2 * t.cp) == 0
    return good | (t.cp == 1)


def _cp_says(case: Case, p: ParallelPlan) -> str:
    seq = case.job.seq_len
    if p.structure.cp_kind == "ulysses":
        return f"ulysses spreads heads: cp {p.cp} does not divide sequence length {seq:,} and {_list(case.heads)} heads / tp {p.tp}"
    return f"{p.structure.cp_kind} context parallelism gives a rank two pieces: 2 x cp {p.cp} does not divide sequence length {seq:,}"


def _sp_sequence(case: Case, s: Structure, t: PlanTable) -> Mask:
    if not s.sequence_parallel:
        return _all(t, True)
    return case.job.seq_len % (t.cp * t.tp) == 0


def _sp_says(case: Case, p: ParallelPlan) -> str:
    return f"sequence parallelism splits the sequence: cp {p.cp} x tp {p.tp} does not divide sequence length {case.job.seq_len:,}"


# --- pipeline ------------------------------------------------------------------------------------------------------------------------


def _stages(case: Case, s: Structure, t: PlanTable) -> Mask:
    stages = t.pp * t.virtual_stages
    if s.layers_per_stage is not None:
        return (stages == len(s.layers_per_stage)) & (sum(s.layers_per_stage) == case.layers)
    return (stages == 1) | (stages <= case.layers + 2)


def _stages_says(case: Case, p: ParallelPlan) -> str:
    stages = p.pp * p.virtual_stages
    if p.structure.layers_per_stage is not None:
        given = p.structure.layers_per_stage
        return f"layers_per_stage deals {sum(given)} layers over {len(given)} stages; the model has {case.layers} and the plan {stages}"
    return f"pp {p.pp} x virtual_stages {p.virtual_stages} = {stages} stages are more than {case.layers} layers, embedding and head ({case.layers + 2} slots)"


def _virtual(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.virtual_stages == 1) | (t.pp > 1)


def _virtual_says(case: Case, p: ParallelPlan) -> str:
    return f"{p.virtual_stages} virtual stages need a pipeline, and pp is 1"


def _schedule_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.pp == 1) | (s.schedule in case.framework(s).schedules)


def _schedule_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} does not run the schedule {p.structure.schedule}; it runs {', '.join(framework.schedules) or 'no pipeline'}"


def _order_error(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> SpecError | None:
    try:
        SCHEDULES[schedule].check(pp, microbatches, virtual_stages)
    except SpecError as error:
        return error
    return None


def _order(case: Case, s: Structure, t: PlanTable) -> Mask:
    """Asks the schedule itself, once for each distinct (pp, micro-batches, virtual stages)."""
    good = np.ones(len(t), dtype=bool)
    rows = np.flatnonzero(t.pp > 1)
    if not len(rows) or s.schedule not in SCHEDULES:
        return good
    columns = t.pp[rows], t.accumulation[rows], t.virtual_stages[rows]
    pp, m, v = (int(c.max()) + 1 for c in columns)
    distinct, back = np.unique(np.ravel_multi_index(columns, (pp, m, v)), return_inverse=True)
    triples = zip(*(c.tolist() for c in np.unravel_index(distinct, (pp, m, v))), strict=True)
    can = np.array([_order_error(s.schedule, *triple) is None for triple in triples])
    good[rows] = can[back.reshape(-1)]
    return good


def _order_says(case: Case, p: ParallelPlan) -> str:
    error = _order_error(p.structure.schedule, p.pp, p.accumulation, p.virtual_stages)
    return error.message if error else f"{p.structure.schedule} has an order for {p.pp} stages and {p.accumulation} micro-batches"


def _largest_stage(case: Case, s: Structure, t: PlanTable, virtual_stages: IntColumn) -> IntColumn:
    """Slots of the largest stage as `cost.stages` deals them; without the ends where the framework deals layers alone and they divide."""
    stages = t.pp * np.maximum(virtual_stages, 1)
    slots = -(-(case.layers + 2) // stages)
    return np.where(case.layers % stages == 0, case.layers // stages, slots) if case.framework(s).even_stages else slots


def _smaller_stages(case: Case, s: Structure, t: PlanTable) -> Mask:
    """The ramp of an interleaved schedule is the time of its first, largest chunk: more chunks of that size only add messages."""
    if s.layers_per_stage is not None:
        return _all(t, True)
    v = t.virtual_stages
    return (v <= 2) | (_largest_stage(case, s, t, v) < _largest_stage(case, s, t, v - 1))


def _smaller_stages_says(case: Case, p: ParallelPlan) -> str:
    row = PlanTable.from_plans([p])
    largest = int(_largest_stage(case, p.structure, row, row.virtual_stages)[0])
    return f"{p.virtual_stages} virtual stages of pp {p.pp} leave {largest} or more in the largest stage, as {p.virtual_stages - 1} do"


def _filled(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.pp == 1) | (t.accumulation >= t.pp)


def _filled_says(case: Case, p: ParallelPlan) -> str:
    return f"{p.accumulation} micro-batches never keep {p.pp} pipeline ranks busy at the same time"


# --- batch and data parallelism ------------------------------------------------------------------------------------------------------


def _batch(case: Case, s: Structure, t: PlanTable) -> Mask:
    return t.dp * t.micro_batch_size * t.accumulation == case.batch


def _batch_says(case: Case, p: ParallelPlan) -> str:
    return f"dp {p.dp} x micro-batch {p.micro_batch_size} does not divide the global batch of {case.batch:,} sequences"


def _sharding_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, s.sharding in case.framework(s).shardings)


def _sharding_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} has no sharding {p.structure.sharding!r}; it has {', '.join(framework.shardings)}"


def _stage_of(s: Structure) -> int:
    return SHARDINGS[s.sharding].stage or 0


def _unsharded(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.dp_shard == 1) | (s.sharding != "none")


def _unsharded_says(case: Case, p: ParallelPlan) -> str:
    return f"sharding none keeps whole copies: dp_shard {p.dp_shard} has nothing to split (dp_replicate = {p.dp} says the same run)"


def _nothing_to_shard(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.dp_shard > 1) | (s.sharding == "none")


def _nothing_says(case: Case, p: ParallelPlan) -> str:
    return f"sharding {p.structure.sharding} over 1 rank splits nothing: the same as none"


def _zero_pipeline(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.pp == 1) | (_stage_of(s) <= case.framework(s).pipeline_zero_stage)


def _zero_pipeline_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} runs its pipeline with ZeRO stage {framework.pipeline_zero_stage} at most, not {p.structure.sharding} with pp {p.pp}"


def _offload_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, s.offload in case.framework(s).offloads)


def _offload_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} cannot offload {p.structure.offload}; it can {', '.join(framework.offloads)}"


def _least_stage_for_offload(s: Structure) -> int:
    """The ZeRO stage below which the setting has no effect or is refused."""
    if s.framework == "deepspeed":
        return {"optimizer-cpu": 1, "params-cpu": 3, "optimizer-nvme": 3, "params-nvme": 3}.get(s.offload, 0)
    return 2 if s.offload.startswith("params") else 0


def _offload_stage(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, _stage_of(s) >= _least_stage_for_offload(s))


def _offload_stage_says(case: Case, p: ParallelPlan) -> str:
    return f"offload {p.structure.offload} works from ZeRO stage {_least_stage_for_offload(p.structure)} on, not with sharding {p.structure.sharding}"


def _step_in_backward(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.accumulation == 1) | (not case.job.optimizer_in_backward)


def _step_in_backward_says(case: Case, p: ParallelPlan) -> str:
    return f"optimizer_in_backward uses each gradient at once: {p.accumulation} micro-batches cannot accumulate"


# --- hardware ------------------------------------------------------------------------------------------------------------------------


def _low_precision(case: Case, s: Structure, t: PlanTable) -> Mask:
    formats = case.cluster.gpu.peak_flops
    return _all(t, case.job.precision not in ("fp8", "fp4") or bool(formats.get(case.job.precision)))


def _half_precision(case: Case, s: Structure, t: PlanTable) -> Mask:
    formats = case.cluster.gpu.peak_flops
    return _all(t, case.job.precision not in ("bf16", "fp16") or bool(formats.get(case.job.precision)))


def _formats(case: Case, p: ParallelPlan) -> str:
    has = ", ".join(f for f in ("fp32", "fp16", "bf16", "fp8", "fp4") if case.cluster.gpu.peak_flops.get(f))
    return f"{case.cluster.gpu.id} has no {case.job.precision} matrix units; it has {has}"


def _compute_capability(case: Case) -> float:
    """NVIDIA's compute capability, infinity for other vendors' devices."""
    try:
        return float(case.cluster.gpu.arch) if case.cluster.gpu.vendor == "NVIDIA" else float("inf")
    except ValueError:
        return float("inf")


def _flash(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, s.attention != "flash" or _compute_capability(case) >= 8.0)


def _flash_says(case: Case, p: ParallelPlan) -> str:
    return f"FlashAttention-2 needs an Ampere GPU or newer; {case.cluster.gpu.id} is compute capability {case.cluster.gpu.arch}"


def _tp_scaleup(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (case.scaleup % t.tp == 0) | (t.tp == 1)


def _tp_scaleup_says(case: Case, p: ParallelPlan) -> str:
    size = case.scaleup
    if p.tp > size:
        return f"tp {p.tp} leaves the {size} GPUs that {case.cluster.gpu.link or 'the fast link'} joins: its collectives in every layer would cross the network"
    return f"tp {p.tp} does not divide the {size} GPUs of a node: some groups would cross the network"


TILE = 128  # rows of a matrix product that a thread block computes at least (CUTLASS, cuBLAS: tiles of 64 to 256 by 128)


def _tile(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.cp == 1) | (t.micro_batch_size * case.job.seq_len >= TILE * t.cp)


def _tile_says(case: Case, p: ParallelPlan) -> str:
    tokens = p.micro_batch_size * case.job.seq_len // p.cp
    return f"cp {p.cp} leaves {tokens} tokens of a micro-batch to a rank, less than the {TILE} rows of one tile of a matrix product"


# --- options without effect ----------------------------------------------------------------------------------------------------------


def _sp_tp(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.tp > 1) | (not s.sequence_parallel)


def _async_tp(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.tp > 1) | (not s.async_tp)


def _modules(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, not s.recompute_modules or s.recompute == "selective")


def _fp8_params(case: Case, s: Structure, t: PlanTable) -> Mask:
    return _all(t, not s.fp8_params or case.job.precision in ("fp8", "fp4"))


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
RULES: tuple[Rule, ...] = (
    Rule("degrees multiply to the GPU count", DEGREES, ("dp", "tp", "pp", "cp"), _gpus, _gpus_says),
    Rule("the framework has the axis", (*DEGREES, "ep"), ("tp", "pp", "cp", "ep"), _axes, _axes_says),
    Rule(
        "tp divides the attention heads",
        ("tp",),
        ("tp",),
        _tp_heads,
        lambda c, p: f"tp {p.tp} does not divide {_list(c.heads)} attention heads",
        source="arXiv:1909.08053 section 3",
    ),
    Rule(
        "tp divides the key-value heads",
        ("tp",),
        ("tp",),
        _kv,
        _kv_says,
        source="Megatron-Core: num_query_groups must be a multiple or divisor of tensor_model_parallel_size",
    ),
    Rule(
        "tp divides the MLP width",
        ("tp",),
        ("tp",),
        lambda c, s, t: _divides(t.tp, c.widths),
        lambda c, p: f"tp {p.tp} does not divide the widths {_list(c.widths)} that row-parallel products sum over",
        source="arXiv:1909.08053 section 3",
    ),
    Rule(
        "cp divides the sequence", ("cp", "tp"), ("cp",), _cp, _cp_says, source="torchtitan seq_len_divisor; arXiv:2309.14509 for ulysses"
    ),
    Rule(
        "dp divides the global batch",
        ("dp_replicate", "dp_shard", "micro_batch_size", "accumulation"),
        ("micro_batch_size", "dp"),
        _batch,
        _batch_says,
    ),
    Rule("pipeline stages hold something", ("pp", "virtual_stages"), ("pp", "virtual_stages"), _stages, _stages_says),
    Rule("experts divide over ep", ("ep",), ("ep",), _ep_experts, _ep_says),
    Rule("etp divides the expert width", ("etp",), ("etp",), _etp_dense, _etp_says),
    Rule(
        "ep fits into dp x cp x tp / etp", ("dp_replicate", "dp_shard", "tp", "cp", "ep", "etp"), ("ep", "etp"), _ep_ranks, _ep_ranks_says
    ),
    Rule("virtual stages need a pipeline", ("pp", "virtual_stages"), ("virtual_stages", "pp"), _virtual, _virtual_says),
    Rule("the framework runs the schedule", ("pp", "schedule"), ("schedule",), _schedule_framework, _schedule_says),
    Rule(
        "the schedule has an order",
        ("pp", "virtual_stages", "schedule", "accumulation"),
        ("micro_batch_size", "virtual_stages", "schedule", "pp"),
        _order,
        _order_says,
    ),
    Rule("the framework has the sharding", ("sharding",), ("sharding",), _sharding_framework, _sharding_says),
    Rule("sharding none keeps whole copies", ("sharding", "dp_shard"), ("sharding",), _unsharded, _unsharded_says),
    Rule(
        "ZeRO stage with pipeline",
        ("sharding", "pp"),
        ("sharding", "pp"),
        _zero_pipeline,
        _zero_pipeline_says,
        source="deepspeed/runtime/pipe/engine.py",
    ),
    Rule("the framework has the offload", ("offload",), ("offload",), _offload_framework, _offload_says),
    Rule(
        "sequence parallelism divides the sequence",
        ("sequence_parallel", "tp", "cp"),
        ("sequence_parallel", "tp"),
        _sp_sequence,
        _sp_says,
        source="arXiv:2205.05198",
    ),
    Rule(
        "no accumulation with optimizer_in_backward",
        ("accumulation",),
        ("micro_batch_size", "dp"),
        _step_in_backward,
        _step_in_backward_says,
    ),
    Rule("the GPU has the low-precision format", (), (), _low_precision, _formats, where="training.precision"),
    Rule("the GPU has the 16-bit format", (), (), _half_precision, _formats, advice=True, where="training.precision"),
    Rule(
        "FlashAttention needs Ampere",
        ("attention",),
        ("attention",),
        _flash,
        _flash_says,
        advice=True,
        source="Dao-AILab/flash-attention README",
    ),
    Rule("tp stays inside the scale-up domain", ("tp",), ("tp",), _tp_scaleup, _tp_scaleup_says, advice=True),
    Rule("cp leaves whole tiles", ("cp", "micro_batch_size"), ("cp",), _tile, _tile_says, advice=True),
    Rule(
        "micro-batches fill the pipeline",
        ("pp", "accumulation"),
        ("micro_batch_size", "pp"),
        _filled,
        _filled_says,
        advice=True,
        source="arXiv:2104.04473 section 2.2: the bubble is (pp - 1) / m of the work",
    ),
    Rule(
        "virtual stages make stages smaller",
        ("pp", "virtual_stages"),
        ("virtual_stages",),
        _smaller_stages,
        _smaller_stages_says,
        advice=True,
    ),
    Rule(
        "sequence parallelism needs tp",
        ("sequence_parallel", "tp"),
        ("sequence_parallel",),
        _sp_tp,
        lambda c, p: "sequence_parallel has no effect at tp 1",
        advice=True,
    ),
    Rule("sharding has ranks to split over", ("sharding", "dp_shard"), ("sharding",), _nothing_to_shard, _nothing_says, advice=True),
    Rule("offload suits the ZeRO stage", ("sharding", "offload"), ("offload",), _offload_stage, _offload_stage_says, advice=True),
    Rule("async_tp needs tp", ("async_tp", "tp"), ("async_tp",), _async_tp, lambda c, p: "async_tp has no effect at tp 1", advice=True),
    Rule(
        "recompute_modules need selective",
        ("recompute", "recompute_modules"),
        ("recompute_modules",),
        _modules,
        lambda c, p: f"recompute_modules have no effect with recompute {p.structure.recompute}",
        advice=True,
    ),
    Rule(
        "fp8_params need fp8",
        ("fp8_params",),
        ("fp8_params",),
        _fp8_params,
        lambda c, p: f"fp8_params has no effect in precision {c.job.precision}",
        advice=True,
    ),
)
ERRORS = tuple(r for r in RULES if not r.advice)
ADVICE = tuple(r for r in RULES if r.advice)


def broken(case: Case, plan: ParallelPlan, rules: tuple[Rule, ...] = RULES) -> list[Rule]:
    """Every rule that the plan breaks, in the order of `RULES`."""
    row = PlanTable.from_plans([plan])
    return [r for r in rules if not r.allows(case, plan.structure, row)[0]]


def violations(case: Case, plan: ParallelPlan, rules: tuple[Rule, ...] = RULES) -> list[Violation]:
    """`broken`, explained."""
    return [explain(case, r, plan, rules) for r in broken(case, plan, rules)]


def check_plan(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan) -> None:
    """Raises `SpecError` with the first rule that makes the plan impossible: what, where, the nearest legal values."""
    case = Case(model, cluster, job)
    for rule in broken(case, plan, ERRORS)[:1]:
        found = explain(case, rule, plan, ERRORS)
        raise SpecError(found.sentence, found.where, found.nearest)


def advise(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan) -> tuple[str, ...]:
    """Sentences about what would run, but is pointless or slow."""
    return tuple(
        f"{v.where}: {v.sentence}" + (f" (better: {', '.join(map(str, v.nearest))})" if v.nearest else "")
        for v in violations(Case(model, cluster, job), plan, ADVICE)
    )


def allowed(case: Case, table: PlanTable, rules: tuple[Rule, ...] = ERRORS) -> Mask:
    """Rows that all rules allow."""
    return mask(case, rules, table)
