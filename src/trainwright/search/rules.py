"""The form of a constraint, and what the constraints know of a case.

A constraint is one entry: `allows` is a mask over the columns of a `PlanTable`, `sentence` says the same of one plan to a person. The legal values that a
sentence offers are found by asking the mask, so validation and search cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost.table import PlanTable
from ..frameworks import FRAMEWORKS
from ..frameworks.base import Framework
from ..spec.blocks import Op
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import NUMBERS, ParallelPlan, Structure

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Case:
    """What a plan is judged against, and the few numbers of it that constraints read."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob

    @cached_property
    def _ops(self) -> tuple[Op, ...]:
        blocks = [block for block, _ in self.model.counts] + list(self.model.mtp)
        return tuple(op for block in blocks for op in block.ops)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Distinct numbers of attention heads of the layers."""
        return tuple(sorted({op.heads for op in self._ops if op.kind in ("attention", "linear_attention") and op.heads}))

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        return tuple(sorted({op.kv_heads for op in self._ops if op.kind in ("attention", "linear_attention") and op.kv_heads}))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """What row-parallel products outside of experts sum over: the MLP's width (and heads x head size, which the heads' rule implies)."""
        return self._summed_over("linear")

    @cached_property
    def expert_widths(self) -> tuple[int, ...]:
        return self._summed_over("grouped_linear")

    def _summed_over(self, kind: str) -> tuple[int, ...]:
        found = set()
        for op in self._ops:
            if op.kind == kind:
                found |= {w.shape[-1] for w in op.weights if len(w.shape) >= 2 and w.tp_dim == len(w.shape) - 1}
        return tuple(sorted(found))

    @cached_property
    def experts(self) -> tuple[int, ...]:
        return tuple(sorted({op.experts for op in self._ops if op.kind == "grouped_linear" and op.experts}))

    @property
    def layers(self) -> int:
        return self.model.num_layers

    @property
    def scaleup(self) -> int:
        """GPUs that the fast link joins, of those that the cluster has."""
        return min(self.cluster.scaleup_gpus, self.cluster.gpus)

    @property
    def batch(self) -> int:
        return self.job.global_batch_size

    def framework(self, structure: Structure) -> Framework:
        return FRAMEWORKS[structure.framework]


@dataclass(frozen=True)
class Rule:
    """One constraint.

    * `reads`: fields of a plan that the mask depends on; the search applies a rule as soon as it has chosen those.
    * `fields`: what a person would change, most natural first; the error names the first of them that has a legal value.
    * `allows(case, structure, table)`: mask [len(table)]; every row of `table` has that structure.
    * `sentence(case, plan)`: what is wrong with a plan that the mask refuses, with its numbers.
    * `advice`: the run would start but be pointless or slow. `estimate` warns with the sentence; the search leaves such plans out unless all of
      `fields` were said by the user.
    """

    name: str
    reads: tuple[str, ...]
    fields: tuple[str, ...]
    allows: Callable[[Case, Structure, PlanTable], Mask]
    sentence: Callable[[Case, ParallelPlan], str]
    advice: bool = False
    where: str = ""
    source: str = ""


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks: the place, the sentence, the nearest values that the rule allows there."""

    rule: Rule
    where: str
    sentence: str
    nearest: tuple[object, ...]


CHOICES: dict[str, tuple[object, ...]] = {
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "schedule": (
        "1f1b",
        "interleaved-1f1b",
        "gpipe",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe",
        "dualpipe-v",
        "eager-1f1b",
        "looped-bfs",
        "interleaved-zb1p",
    ),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer-cpu", "params-cpu", "optimizer-nvme", "params-nvme", "activations-cpu"),
    "attention": ("flash", "efficient", "sdpa-math", "eager"),
    "sequence_parallel": (True, False),
    "async_tp": (False, True),
    "fp8_params": (False, True),
    "recompute_modules": ((),),
    "layers_per_stage": (None,),
}


def with_field(case: Case, plan: ParallelPlan, field: str, value: Any) -> ParallelPlan:
    """The plan with one field changed and what follows from it: data parallelism takes the GPUs that are left, accumulation the batch that is left."""
    if field in CHOICES or field not in (*NUMBERS, "dp"):
        plan = replace(plan, structure=replace(plan.structure, **{field: value}))
    elif field == "dp":
        plan = _with_dp(plan, int(value))
    else:
        plan = replace(plan, **{field: int(value)})  # type: ignore[arg-type]
    if field in ("tp", "pp", "cp"):
        rest = plan.tp * plan.pp * plan.cp
        if case.cluster.gpus % rest == 0:
            plan = _with_dp(plan, case.cluster.gpus // rest)
    if field in ("dp", "tp", "pp", "cp", "micro_batch_size", "dp_shard", "dp_replicate"):
        plan = replace(plan, accumulation=max(1, case.batch // (plan.dp * plan.micro_batch_size)))
    return plan


def _with_dp(plan: ParallelPlan, dp: int) -> ParallelPlan:
    if plan.structure.sharding == "none":
        return replace(plan, dp_replicate=dp, dp_shard=1)
    replicate = plan.dp_replicate if dp % plan.dp_replicate == 0 else 1
    return replace(plan, dp_replicate=replicate, dp_shard=dp // replicate)


def mask(case: Case, rules: Sequence[Rule], table: PlanTable) -> Mask:
    """Rows that all `rules` allow."""
    good = np.ones(len(table), dtype=bool)
    for structure, rows in table.by_structure():
        part = table.take(rows)
        for rule in rules:
            good[rows] &= rule.allows(case, structure, part)
    return good


def divisors(n: int) -> list[int]:
    """All divisors, ascending; n up to about 1e14."""
    small, large, d = [], [], 1
    while d * d <= n:
        if n % d == 0:
            small.append(d)
            if d * d != n:
                large.append(n // d)
        d += 1
    return small + large[::-1]


def nearest_values(case: Case, rules: Sequence[Rule], plan: ParallelPlan, field: str, count: int = 2) -> list[object]:
    """Values of `field` next to the plan's own that all `rules` allow, the rest of the plan as it is: up to `count` on either side."""
    if field in CHOICES:
        choices: list[object] = list(CHOICES[field])
        rows = PlanTable.from_plans([with_field(case, plan, field, c) for c in choices])
        return [c for c, good in zip(choices, mask(case, rules, rows), strict=True) if good][: 2 * count]
    now = plan.dp if field == "dp" else int(getattr(plan, field))
    numbers = sorted({*range(1, 17), *range(max(1, now - 8), now + 9), *divisors(case.cluster.gpus), *divisors(case.batch)})
    rows = PlanTable.from_plans([with_field(case, plan, field, n) for n in numbers])
    good = [n for n, ok in zip(numbers, mask(case, rules, rows), strict=True) if ok]
    return [*[n for n in good if n < now][-count:], *[n for n in good if n > now][:count]]


def explain(case: Case, rule: Rule, plan: ParallelPlan, rules: Sequence[Rule]) -> Violation:
    """The violation of `rule` by `plan`, with the nearest values that satisfy it and the other rules about the same field."""
    for field in rule.fields:
        same = [r for r in rules if r is rule or (r.fields and r.fields[0] == field and not r.advice)]
        near = nearest_values(case, same, plan, field) or nearest_values(case, [rule], plan, field)
        if near:
            return Violation(rule, f"strategy.{field}", rule.sentence(case, plan), tuple(near))
    where = rule.where or (f"strategy.{rule.fields[0]}" if rule.fields else "strategy")
    return Violation(rule, where, rule.sentence(case, plan), ())
