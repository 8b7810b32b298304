"""Why the winner wins, what limits it, why the others come after it: sentences made of the columns of a `Ranking`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..cost.money import days
from ..cost.table import PlanTable
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from ..units import format_bytes, format_seconds
from .constraints import ERRORS
from .order import mechanisms
from .pricing import Equations
from .rank import Ranking, SearchOptions
from .rules import Case, mask, with_field

NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_comm": "tensor-parallel communication",
    "dp_comm": "data-parallel communication",
    "pp_comm": "messages between pipeline stages",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert all-to-all",
    "bubble": "the pipeline bubble",
    "optimizer": "the optimizer",
    "offload": "offload",
    "other": "host and other floors",
}


def explain_ranking(model: ModelSpec, job: TrainingJob, options: SearchOptions, ranking: Ranking, pricing: type[Equations]) -> Ranking:
    """The ranking with `reasons`: all sentences for the first plan, one for each other."""
    cluster = ranking.clusters[0]
    case = Case(model, cluster, job)
    first = [_why_first(ranking, options, job), limits(ranking, 0), *memory_limits(case, ranking, options, pricing(model, cluster, job))]
    if len(ranking) > 1:
        first.append(f"The runner-up ({ranking.plans.plan(1)}) lost: {behind(ranking, 1, options)}.")
    rest = [(f"{ranking.plans.plan(i)}: {behind(ranking, i, options)}.",) for i in range(1, len(ranking))]
    return replace(ranking, reasons=(tuple(first), *rest))


def _why_first(ranking: Ranking, options: SearchOptions, job: TrainingJob) -> str:
    plan, step = ranking.plans.plan(0), float(ranking.step_s[0])
    run = days(job, step)
    result = f"{format_seconds(step)} a step" + (f", {format_seconds(run * 86400)} of steps for the run" if run is not None else "")
    what = {"time": "fastest", "cost": "cheapest", "memory": "smallest"}[options.objective]
    if options.objective == "memory":
        result = f"{format_bytes(float(ranking.device_bytes[0]))} of a card, {result}"
    best = int(np.argmin(ranking.value))
    lead = f"{plan}: {result}"
    if best == 0:
        return f"{lead}; the {what} of {ranking.searched:,} layouts."
    other = ranking.plans.plan(best)
    gap = float(ranking.value[0] / ranking.value[best] - 1)
    fewer = mechanisms(other) - mechanisms(plan)
    simpler = f"uses {fewer} mechanism{'s' * (fewer > 1)} fewer" if fewer > 0 else _simpler(plan, other)
    return f"{lead}; within {gap:.1%} of the {what} of {ranking.searched:,} layouts ({other}), and simpler: it {simpler}."


def _simpler(plan: ParallelPlan, other: ParallelPlan) -> str:
    if plan.tp * plan.pp * plan.cp < other.tp * other.pp * other.cp:
        return "splits the model over fewer GPUs"
    return "has fewer stages" if plan.virtual_stages < other.virtual_stages else "is better among plans as simple"


def limits(ranking: Ranking, i: int) -> str:
    """What the step of row i is made of, and the largest part that is not compute."""
    step = float(ranking.step_s[i])
    parts = {k: float(v[i]) for k, v in ranking.breakdown.items()}
    losses = sorted(((v, k) for k, v in parts.items() if k != "compute" and v > 0.001 * step), reverse=True)
    share = parts.get("compute", 0.0) / step
    if not losses:
        return f"What limits it: compute alone, {share:.0%} of the step."
    named = [f"{NAMES.get(k, k)} ({v / step:.0%}, {format_seconds(v)})" for v, k in losses[:2]]
    return f"What limits it: {share:.0%} of the step is compute; the largest loss is {', then '.join(named)}."


def memory_limits(case: Case, ranking: Ranking, options: SearchOptions, pricing: Equations) -> list[str]:
    """What the card leaves, and the next plans that it does not hold: the obvious wishes, priced."""
    plan, capacity = ranking.plans.plan(0), case.cluster.gpu.capacity_bytes
    used = float(ranking.device_bytes[0])
    margin = case.cluster.memory_margin if options.memory_margin is None else options.memory_margin
    sentences = [f"It needs {format_bytes(used)} of a card's {format_bytes(capacity)} ({used / capacity:.0%})."]
    if used > capacity * (1 - margin):
        sentences[0] = sentences[0][:-1] + f", inside the {margin:.0%} that should stay free: tight."
    wishes = [(text, wish) for text, wish in _wishes(case, plan) if mask(case, ERRORS, PlanTable.from_plans([wish]))[0]]
    if wishes:
        need = pricing.need(PlanTable.from_plans([wish for _, wish in wishes])).device
        too_much = [
            f"{text} would need {format_bytes(float(n))}" for (text, _), n in zip(wishes, need, strict=True) if n > capacity * (1 - margin)
        ]
        if too_much:
            sentences.append(f"Memory keeps it from more: {'; '.join(too_much)}.")
    return sentences


def _wishes(case: Case, plan: ParallelPlan) -> list[tuple[str, ParallelPlan]]:
    s = plan.structure
    found = []
    less = {"full": "selective", "selective": "none"}.get(s.recompute)
    if less:
        found.append((f"recompute {less}", with_field(case, plan, "recompute", less)))
    if plan.accumulation % 2 == 0:
        found.append((f"micro-batch {2 * plan.micro_batch_size}", with_field(case, plan, "micro_batch_size", 2 * plan.micro_batch_size)))
    if s.offload != "none":
        found.append(("no offload", with_field(case, plan, "offload", "none")))
    halves = [axis for axis in ("tp", "pp") if getattr(plan, axis) % 2 == 0 and (axis == "tp" or plan.pp > 2 or plan.virtual_stages == 1)]
    found += [(f"{axis} {getattr(plan, axis) // 2}", with_field(case, plan, axis, getattr(plan, axis) // 2)) for axis in halves]
    return [(text, wish) for text, wish in found if wish.dp * wish.micro_batch_size * wish.accumulation == case.batch]


def behind(ranking: Ranking, i: int, options: SearchOptions) -> str:
    """Why row i stands behind the first: the difference, and the parts that make it."""
    gap = float(ranking.value[i] / ranking.value[0] - 1)
    if options.objective == "memory":
        return (
            f"it needs {format_bytes(abs(float(ranking.device_bytes[i] - ranking.device_bytes[0])))} {'more' if gap >= 0 else 'less'}"
            + _or_equal(gap)
        )
    per = "slower" if options.objective == "time" else "dearer"
    text = (
        f"{gap:.1%} {per}"
        if gap >= 0
        else f"{-gap:.1%} {'faster' if per == 'slower' else 'cheaper'}, which counts as equal, but less simple"
    )
    changes = differences({k: float(v[i] - v[0]) for k, v in ranking.breakdown.items()}, float(ranking.step_s[0]))
    return f"{text}, {changes}" if changes else text


def _or_equal(gap: float) -> str:
    return ", which counts as equal, but is less simple" if gap < 0 else ""


def differences(change: Mapping[str, float], step_s: float) -> str:
    """The largest terms that differ, ``+`` where the other plan takes longer."""
    large = sorted((k for k, v in change.items() if abs(v) > 1e-3 * step_s), key=lambda k: -abs(change[k]))
    return ", ".join(f"{NAMES.get(k, k)} {'+' if change[k] > 0 else '-'}{format_seconds(abs(change[k]))}" for k in large[:3])
