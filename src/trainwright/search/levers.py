"""What one change would do: each lever of memory pulled alone, with what it costs in time.

A lever is one entry of `LEVERS`: a name and a function from (job, plan) to the changed pair, or None where it changes nothing. What a constraint
refuses is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cost.estimate import Estimate, evaluate
from ..cost.table import PlanTable
from ..errors import SpecError
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from .constraints import check_plan

Change = Callable[[TrainingJob, ParallelPlan], tuple[TrainingJob, ParallelPlan] | None]


def _structure(plan: ParallelPlan, **fields: object) -> ParallelPlan:
    return replace(plan, structure=replace(plan.structure, **fields))  # type: ignore[arg-type]


def _one_more_sequence(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan]:
    bigger = replace(plan, micro_batch_size=plan.micro_batch_size + 1)
    return replace(job, global_batch_size=bigger.dp * bigger.micro_batch_size * plan.accumulation), bigger


def _half_micro_batch(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
    if plan.micro_batch_size % 2:
        return None
    return job, replace(plan, micro_batch_size=plan.micro_batch_size // 2, accumulation=plan.accumulation * 2)


def _half_sequence(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
    return None if job.seq_len % 2 else (replace(job, seq_len=job.seq_len // 2), plan)


def _recompute(mode: str) -> Change:
    def change(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
        return (
            None if plan.structure.recompute == mode else (job, _structure(plan, recompute=mode, recompute_every=1, recompute_modules=()))
        )

    return change


def _tp(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
    """Twice the tensor parallelism, half the shards, the same batch."""
    axis = "dp_shard" if plan.dp_shard > 1 else "dp_replicate"
    ranks = getattr(plan, axis)
    if ranks % 2:
        return None
    wider = replace(plan, tp=plan.tp * 2, accumulation=plan.accumulation * 2, **{axis: ranks // 2})
    return job, _structure(wider, sequence_parallel=True)


def _loss(kind: str) -> Change:
    return lambda job, plan: None if job.loss == kind else (replace(job, loss=kind), plan)


def _sharding(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
    order = ("none", "zero1", "zero2", "zero3")
    if plan.dp == 1 or plan.structure.sharding == "zero3":
        return None
    return job, replace(_structure(plan, sharding=order[order.index(plan.structure.sharding) + 1]), dp_replicate=1, dp_shard=plan.dp)


def _offload(job: TrainingJob, plan: ParallelPlan) -> tuple[TrainingJob, ParallelPlan] | None:
    return None if plan.structure.offload != "none" else (job, _structure(plan, offload="optimizer-cpu"))


LEVERS: tuple[tuple[str, Change], ...] = (
    ("one more sequence in the micro-batch", _one_more_sequence),
    ("half the micro-batch", _half_micro_batch),
    ("half the sequence length", _half_sequence),
    ("no recomputation", _recompute("none")),
    ("selective recomputation", _recompute("selective")),
    ("full recomputation", _recompute("full")),
    ("twice the tensor parallelism", _tp),
    ("chunked loss", _loss("chunked")),
    ("the next ZeRO stage", _sharding),
    ("optimizer in host memory", _offload),
)


@dataclass(frozen=True)
class Lever:
    """`device_bytes` and `tokens_per_s` after the change; the deltas are against the run as it is."""

    name: str
    device_bytes: int
    delta_bytes: int
    tokens_per_s: float
    speed: float  # tokens/s relative to the run as it is
    fits: bool


def levers(estimate: Estimate) -> list[Lever]:
    """Every lever that is legal for this run, in the order of `LEVERS`."""
    found = []
    for name, change in LEVERS:
        changed = change(estimate.job, estimate.plan)
        if changed is None:
            continue
        after = _estimate(estimate.model, estimate.cluster, *changed)
        if after is not None:
            speed = after.tokens_per_s / estimate.tokens_per_s
            found.append(Lever(name, after.device_bytes, after.device_bytes - estimate.device_bytes, after.tokens_per_s, speed, after.fits))
    return found


def _estimate(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan) -> Estimate | None:
    try:
        check_plan(model, cluster, job, plan)
    except SpecError:
        return None
    return evaluate(model, cluster, job, PlanTable.from_plans([plan])).row(0, {})
