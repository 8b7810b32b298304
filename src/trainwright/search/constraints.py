"""Every constraint on a layout, one entry each: a sentence for a person and a mask over columns for the search.

`check_plan` refuses a plan that cannot run; `advise` lists what would run but be pointless or slow; `trainwright.search.space` applies the same masks to
millions of rows. To add a constraint, add an entry to `RULES`.
"""

from __future__ import annotations

from ..cost.table import PlanTable
from ..errors import SpecError
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from . import choices, degrees
from .rules import Case, Mask, Rule, Violation, explain, mask

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
RULES: tuple[Rule, ...] = (
    Rule("degrees multiply to the GPU count", DEGREES, ("dp", "tp", "pp", "cp"), degrees.gpus, degrees.gpus_says),
    Rule("the framework has the axis", (*DEGREES, "ep"), ("tp", "pp", "cp", "ep"), degrees.axes, degrees.axes_says),
    Rule(
        "tp divides the attention heads",
        ("tp",),
        ("tp",),
        degrees.tp_heads,
        lambda c, p: f"tp {p.tp} does not divide {degrees.listed(c.heads)} attention heads",
        source="arXiv:1909.08053 section 3",
    ),
    Rule(
        "tp divides the key-value heads",
        ("tp",),
        ("tp",),
        degrees.kv,
        degrees.kv_says,
        source="Megatron-Core: num_query_groups must be a multiple or divisor of tensor_model_parallel_size",
    ),
    Rule(
        "tp divides the MLP width",
        ("tp",),
        ("tp",),
        lambda c, s, t: degrees.divides(t.tp, c.widths),
        lambda c, p: f"tp {p.tp} does not divide the widths {degrees.listed(c.widths)} that row-parallel products sum over",
        source="arXiv:1909.08053 section 3",
    ),
    Rule(
        "cp divides the sequence",
        ("cp", "tp"),
        ("cp",),
        degrees.cp,
        degrees.cp_says,
        source="torchtitan seq_len_divisor; arXiv:2309.14509 for ulysses",
    ),
    Rule(
        "dp divides the global batch",
        ("dp_replicate", "dp_shard", "micro_batch_size", "accumulation"),
        ("micro_batch_size", "dp"),
        choices.batch,
        choices.batch_says,
    ),
    Rule("pipeline stages hold something", ("pp", "virtual_stages"), ("pp", "virtual_stages"), degrees.stages, degrees.stages_says),
    Rule(
        "layers_per_stage deals every layer",
        ("pp", "virtual_stages"),
        (),
        degrees.dealt,
        degrees.dealt_says,
        where="strategy.layers_per_stage",
    ),
    Rule("experts divide over ep", ("ep",), ("ep",), degrees.ep_experts, degrees.ep_says),
    Rule("etp divides the expert width", ("etp",), ("etp",), degrees.etp_dense, degrees.etp_says),
    Rule(
        "ep fits into dp x cp x tp / etp",
        ("dp_replicate", "dp_shard", "tp", "cp", "ep", "etp"),
        ("ep", "etp"),
        degrees.ep_ranks,
        degrees.ep_ranks_says,
    ),
    Rule("virtual stages need a pipeline", ("pp", "virtual_stages"), ("virtual_stages", "pp"), degrees.virtual, degrees.virtual_says),
    Rule("the framework runs the schedule", ("pp", "schedule"), ("schedule",), degrees.schedule_framework, degrees.schedule_says),
    Rule(
        "the schedule has an order",
        ("pp", "virtual_stages", "schedule", "accumulation"),
        ("micro_batch_size", "virtual_stages", "schedule", "pp"),
        degrees.order,
        degrees.order_says,
    ),
    Rule("the framework has the sharding", ("sharding",), ("sharding",), choices.sharding_framework, choices.sharding_says),
    Rule("sharding none keeps whole copies", ("sharding", "dp_shard"), ("sharding",), choices.unsharded, choices.unsharded_says),
    Rule(
        "ZeRO stage with pipeline",
        ("sharding", "pp"),
        ("sharding", "pp"),
        choices.zero_pipeline,
        choices.zero_pipeline_says,
        source="deepspeed/runtime/pipe/engine.py",
    ),
    Rule(
        "unsplit gradients are of the weights' type",
        ("sharding",),
        ("sharding",),
        choices.whole_gradients,
        choices.whole_gradients_says,
        source="deepspeed/runtime/engine.py _do_optimizer_sanity_check",
    ),
    Rule(
        "ZeRO-1 beside experts",
        ("sharding", "ep"),
        ("sharding", "ep"),
        choices.zero1_experts,
        choices.zero1_experts_says,
        source="torch/distributed/optim/zero_redundancy_optimizer.py",
    ),
    Rule("the framework has the offload", ("offload",), ("offload",), choices.offload_framework, choices.offload_says),
    Rule(
        "sequence parallelism divides the sequence",
        ("sequence_parallel", "tp", "cp"),
        ("sequence_parallel", "tp"),
        degrees.sp_sequence,
        degrees.sp_says,
        source="arXiv:2205.05198",
    ),
    Rule(
        "no accumulation with optimizer_in_backward",
        ("accumulation",),
        ("micro_batch_size", "dp"),
        choices.step_in_backward,
        choices.step_in_backward_says,
    ),
    Rule("the GPU has the low-precision format", (), (), choices.low_precision, choices.formats, where="training.precision"),
    Rule("the GPU has the 16-bit format", (), (), choices.half_precision, choices.formats, advice=True, where="training.precision"),
    Rule(
        "FlashAttention needs Ampere",
        ("attention",),
        ("attention",),
        choices.flash,
        choices.flash_says,
        advice=True,
        source="Dao-AILab/flash-attention README",
    ),
    Rule("tp stays inside the scale-up domain", ("tp",), ("tp",), choices.tp_scaleup, choices.tp_scaleup_says, advice=True),
    Rule("cp leaves whole tiles", ("cp", "micro_batch_size"), ("cp",), choices.tile, choices.tile_says, advice=True),
    Rule(
        "micro-batches fill the pipeline",
        ("pp", "accumulation"),
        ("micro_batch_size", "pp"),
        degrees.filled,
        degrees.filled_says,
        advice=True,
        source="arXiv:2104.04473 section 2.2: the bubble is (pp - 1) / m of the work",
    ),
    Rule(
        "virtual stages make stages smaller",
        ("pp", "virtual_stages"),
        ("virtual_stages",),
        degrees.smaller_stages,
        degrees.smaller_stages_says,
        advice=True,
    ),
    Rule(
        "sequence parallelism needs tp",
        ("sequence_parallel", "tp"),
        ("sequence_parallel",),
        choices.sp_tp,
        lambda c, p: "sequence_parallel has no effect at tp 1",
        advice=True,
    ),
    Rule(
        "sharding has ranks to split over",
        ("sharding", "dp_shard", "cp"),
        ("sharding",),
        choices.nothing_to_shard,
        choices.nothing_says,
        advice=True,
    ),
    Rule(
        "offload suits the ZeRO stage",
        ("sharding", "offload"),
        ("offload",),
        choices.offload_stage,
        choices.offload_stage_says,
        advice=True,
    ),
    Rule(
        "async_tp needs tp", ("async_tp", "tp"), ("async_tp",), choices.async_tp, lambda c, p: "async_tp has no effect at tp 1", advice=True
    ),
    Rule(
        "recompute_modules need selective",
        ("recompute", "recompute_modules"),
        ("recompute_modules",),
        choices.modules,
        lambda c, p: f"recompute_modules have no effect with recompute {p.structure.recompute}",
        advice=True,
    ),
    Rule(
        "fp8_params need fp8",
        ("fp8_params",),
        ("fp8_params",),
        choices.fp8_params,
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
