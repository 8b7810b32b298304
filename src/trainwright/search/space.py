"""Every layout of a number of GPUs, as columns.

The space is the product of (dp_replicate, dp_shard, tp, pp, cp) over all ordered ways to write the GPU count as a product of five, micro-batch sizes that
divide a replica's share of the batch, schedules with their virtual stages, expert parallelism, sharding, sequence parallelism, recompute and offload. What
would say the same run twice is counted once: no schedule and one virtual stage without a pipeline, no sequence parallelism without tp, sharding none only
where dp_shard is 1, and sharding only where there are ranks to shard over (context parallel ones among them).

Plans are made level by level. A rule is applied at the first level at which all that it reads is chosen, and is credited with every plan that the row it
removed would have become; so ``searched == sum(removed.values()) + what is left``. Recompute and offload stay open (`Space.recomputes`, `Space.offloads`):
the ranking prices them in order of their cost and needs only those that matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..cost.table import IntColumn, PlanTable
from ..errors import SpecError
from ..frameworks import FRAMEWORKS
from ..frameworks.base import Framework
from ..schedules import SCHEDULES
from ..spec.plan import NUMBERS, ParallelPlan, Structure
from ..spec.run import StrategySection
from .constraints import ERRORS, RULES
from .grid import Grid, choices, lookup
from .rules import Case, Rule, divisors, explain

DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
WITHOUT_SP = "tp without sequence parallelism: more memory, hardly less time"
LATE = ("recompute", "offload", "recompute_modules")


@dataclass(frozen=True)
class Space:
    """`table` holds every plan that the rules leave, at the first of `recomputes` and of `offloads`; `removed` counts plans, late choices included."""

    table: PlanTable
    removed: dict[str, int]
    searched: int
    recomputes: tuple[str, ...]
    offloads: tuple[str, ...]
    twins: bool = False  # plans without sequence parallelism were left out where the same plan with it is there

    def at(self, table: PlanTable, recompute: str, offload: str) -> PlanTable:
        """The same rows with another recompute and offload."""
        return replace(table, structures=tuple(replace(s, recompute=recompute, offload=offload) for s in table.structures))


def fixed_fields(strategy: StrategySection) -> frozenset[str]:
    """Fields of ``[strategy]`` that were said."""
    return frozenset(name for name in StrategySection.model_fields if getattr(strategy, name) is not None)


def rules_for(strategy: StrategySection, advice: bool = True) -> tuple[Rule, ...]:
    """All errors, and (with `advice`) the advice about what the user left open."""
    said = fixed_fields(strategy)
    return tuple(r for r in RULES if not r.advice or (advice and r.fields and not set(r.fields) <= said))


def base_structure(case: Case, strategy: StrategySection, framework: Framework) -> Structure:
    """What the search does not vary: said, or the default; attention is the fastest kernel that the GPU runs."""
    default = Structure(framework=framework.name, sharding=str(framework.defaults.get("sharding", "zero3")))
    said = {
        name: getattr(strategy, name)
        for name in Structure.__dataclass_fields__
        if name not in ("framework", "options") and getattr(strategy, name, None) is not None
    }
    options = {**dict(framework.search_options), **(strategy.options or {})}
    structure = replace(default, **said, options=tuple(sorted(options.items())))
    structure = replace(structure, cp_kind=strategy.cp_kind or str(framework.defaults.get("cp_kind", "ring")))
    if strategy.attention is None:
        flash = next(r for r in RULES if r.name == "FlashAttention needs Ampere")
        one = PlanTable.from_plans([ParallelPlan(structure)])
        if not flash.allows(case, structure, one)[0]:
            structure = replace(structure, attention="efficient")
    return structure


def check_fixed(case: Case, strategy: StrategySection, structure: Structure) -> None:
    """Raises `SpecError` where what was said can never be right, whatever the search chooses for the rest."""
    gpus = case.cluster.gpus
    names = [n for n in ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp") if getattr(strategy, n) is not None]
    for name in names:
        value = getattr(strategy, name)
        if gpus % value:
            near = divisors(gpus)
            below, above = [d for d in near if d < value][-2:], [d for d in near if d > value][:2]
            raise SpecError(f"{value} does not divide {gpus:,} GPUs", f"strategy.{name}", [*below, *above])
    degrees = [n for n in names if not (n != "dp" and n.startswith("dp") and strategy.dp is not None)]
    product = int(np.prod([getattr(strategy, n) for n in degrees], dtype=object)) if degrees else 1
    if gpus % product:
        said = " x ".join(f"{n} {getattr(strategy, n)}" for n in degrees)
        raise SpecError(f"{said} = {product:,} does not divide {gpus:,} GPUs", f"strategy.{degrees[-1]}")
    parts = (strategy.dp_replicate or 1) * (strategy.dp_shard or 1)
    if strategy.dp is not None and strategy.dp % parts:
        raise SpecError(f"dp {strategy.dp} is no multiple of dp_replicate x dp_shard = {parts}", "strategy.dp", [parts])
    _check_batch(case, strategy)
    plan = _plan_of(case, strategy, structure)
    said_fields = fixed_fields(strategy) | ({"dp_replicate", "dp_shard"} if strategy.dp is not None else set())
    row = PlanTable.from_plans([plan])
    for rule in ERRORS:
        if set(rule.reads) <= said_fields and not rule.allows(case, structure, row)[0]:
            found = explain(case, rule, plan, ERRORS)
            raise SpecError(found.sentence, found.where, found.nearest)


def _check_batch(case: Case, strategy: StrategySection) -> None:
    """Replicas and micro-batch, as far as they were said, must divide the batch."""
    replicas = strategy.dp or (strategy.dp_replicate or 1) * (strategy.dp_shard or 1)
    micro = strategy.micro_batch_size or 1
    if case.batch % (replicas * micro):
        name = "micro_batch_size" if strategy.micro_batch_size and case.batch % replicas == 0 else "dp"
        value, of = (micro, case.batch // replicas) if name == "micro_batch_size" else (replicas, case.batch)
        near = divisors(of)
        raise SpecError(
            f"dp {replicas} x micro-batch {micro} does not divide the global batch of {case.batch:,} sequences",
            f"strategy.{name}",
            [*[d for d in near if d < value][-2:], *[d for d in near if d > value][:2]],
        )


def _plan_of(case: Case, strategy: StrategySection, structure: Structure) -> ParallelPlan:
    """The fixed fields as a plan, the rest at 1, data parallelism what is left."""
    numbers = {n: getattr(strategy, n, None) or 1 for n in NUMBERS if n != "accumulation"}
    rest = numbers["tp"] * numbers["pp"] * numbers["cp"]
    dp = strategy.dp or max(1, case.cluster.gpus // rest)
    if structure.sharding == "none":
        numbers |= {"dp_replicate": dp // numbers["dp_shard"]}
    else:
        numbers |= {"dp_shard": max(1, dp // numbers["dp_replicate"])}
    size = numbers["dp_replicate"] * numbers["dp_shard"] * numbers["micro_batch_size"]
    return ParallelPlan(structure, **numbers, accumulation=max(1, case.batch // size))


def enumerate_plans(case: Case, strategy: StrategySection, advice: bool = True) -> Space:
    """The whole space of the case for what `strategy` leaves open. Raises `SpecError` where what it says is impossible in itself."""
    framework = FRAMEWORKS.get_or_raise(strategy.framework or "fsdp2", "strategy.framework")
    structure = base_structure(case, strategy, framework)
    check_fixed(case, strategy, structure)
    return _Enumeration(case, strategy, framework, structure, advice).run()


class _Enumeration:
    """One enumeration: the order of choices, and which rules become applicable after each."""

    def __init__(self, case: Case, strategy: StrategySection, framework: Framework, structure: Structure, advice: bool) -> None:
        self.case, self.said, self.framework, self.structure = case, strategy, framework, structure
        self.waiting = list(rules_for(strategy, advice))
        self.advice = advice
        self.schedules: tuple[str, ...] = (strategy.schedule,) if strategy.schedule else framework.schedules
        self.shardings: tuple[str, ...] = (strategy.sharding,) if strategy.sharding else framework.shardings
        self.recomputes = self._recomputes()
        self.offloads: tuple[str, ...] = (strategy.offload,) if strategy.offload else framework.offloads

    def _recomputes(self) -> tuple[str, ...]:
        if self.said.recompute:
            return (self.said.recompute,)
        if self.said.recompute_every:
            return ("full",)
        return ("selective",) if self.said.recompute_modules else ("none", "selective", "full")

    def _ready(self, *chosen: str) -> list[Rule]:
        """Rules whose every field is among `chosen`; each is handed out once."""
        ready = [r for r in self.waiting if set(r.reads) <= set(chosen)]
        self.waiting = [r for r in self.waiting if r not in ready]
        return ready

    def run(self) -> Space:
        case, base = self.case, {0: self.structure}
        grid = self._layouts()
        searched = int(grid.weight().sum())
        chosen = [*DEGREES, "attention", "async_tp", "fp8_params"]
        grid.apply(case, self._ready(*chosen), base)
        self._micro_batches(grid)
        chosen += ["micro_batch_size", "accumulation"]
        grid.apply(case, self._ready(*chosen), base)
        self._experts(grid)
        chosen += ["ep", "etp"]
        grid.apply(case, self._ready(*chosen), base)
        self._pipelines(grid)
        chosen += ["schedule", "virtual_stages"]
        grid.apply(
            case, self._ready(*chosen), {i: replace(self.structure, schedule=s) for i, s in enumerate(self.schedule_names)}, "schedule"
        )
        self._sharding(grid)
        chosen += ["sharding"]
        grid.apply(
            case, self._ready(*chosen), {i: replace(self.structure, sharding=s) for i, s in enumerate(self.sharding_names)}, "sharding"
        )
        self._sequence(grid)
        chosen += ["sequence_parallel"]
        both = {0: replace(self.structure, sequence_parallel=False), 1: replace(self.structure, sequence_parallel=True)}
        grid.apply(case, self._ready(*chosen), both, "sequence_parallel")
        table = self._table(grid)
        self._late(grid, table)
        return Space(table, grid.removed, searched, self.recomputes, self.offloads, WITHOUT_SP in grid.removed)

    def _layouts(self) -> Grid:
        """All ordered factorizations of the GPU count into the five degrees, as far as they are open."""
        gpus = self.case.cluster.gpus
        divs = np.array(divisors(gpus), dtype=np.int64)
        of = {int(d): divs[d % divs == 0] for d in divs}
        columns: dict[str, IntColumn] = {}
        rest = np.array([gpus], dtype=np.int64)
        for name in DEGREES[:-1]:
            said = getattr(self.said, name)
            degrees = [of[int(r)] if said is None else of[int(r)][of[int(r)] == said] for r in rest]
            counts = np.array([len(c) for c in degrees], dtype=np.int64)
            columns = {k: np.repeat(v, counts) for k, v in columns.items()}
            columns[name] = np.concatenate(degrees) if degrees else rest
            rest = np.repeat(rest, counts) // columns[name]
        columns["dp_shard"] = rest
        keep = np.ones(len(rest), dtype=bool)
        if self.said.dp_shard is not None:
            keep &= columns["dp_shard"] == self.said.dp_shard
        if self.said.dp is not None:
            keep &= columns["dp_shard"] * columns["dp_replicate"] == self.said.dp
        if self.said.sharding == "none":
            keep &= columns["dp_shard"] == 1
        elif self.said.sharding is not None and self.said.dp_shard is None:
            # "sharding = zero3" alone means that everybody shards where somebody can
            keep &= (columns["dp_shard"] > 1) | (columns["dp_replicate"] == 1)
        columns = {k: v[keep] for k, v in columns.items()}
        grid = Grid(columns, {}, len(self.recomputes) * len(self.offloads))
        self._count_options(grid)
        return grid

    def _count_options(self, grid: Grid) -> None:
        c = grid.columns
        dp = c["dp_replicate"] * c["dp_shard"]
        grid.options = {
            "micro_batch": lookup(dp, lambda d: len(self._micro_batch_sizes(d))),
            "experts": lookup(c["tp"], lambda t: len(self._expert_choices(t)[0])),
            "pipeline": lookup(c["pp"], lambda p: len(self._pipeline_choices(p)[0])),
            "sharding": lookup(self._splits(c), lambda d: len(self._sharding_choices(d))),
            "sequence": lookup(c["tp"], lambda t: len(self._sequence_choices(t))),
        }

    def _micro_batch_sizes(self, dp: int) -> list[int]:
        if self.said.micro_batch_size:
            return [self.said.micro_batch_size]
        share, left = divmod(self.case.batch, dp)
        return [1] if left else divisors(share)

    def _micro_batches(self, grid: Grid) -> None:
        dp = grid.columns["dp_replicate"] * grid.columns["dp_shard"]
        counts, values = choices(dp, lambda d: [self._micro_batch_sizes(d)])
        per_replica = np.repeat(self.case.batch // dp, counts)
        grid.expand("micro_batch", counts, {"micro_batch_size": values[0], "accumulation": np.maximum(per_replica // values[0], 1)})

    def _expert_choices(self, tp: int) -> tuple[list[int], list[int]]:
        experts = self.case.experts
        ep = [self.said.ep] if self.said.ep else divisors(int(np.gcd.reduce(experts))) if experts and "ep" in self.framework.axes else [1]
        etp = [self.said.etp] if self.said.etp else divisors(tp) if experts else [1]
        return [e for e in ep for _ in etp], [t for _ in ep for t in etp]

    def _experts(self, grid: Grid) -> None:
        counts, values = choices(grid.columns["tp"], self._expert_choices)
        grid.expand("experts", counts, {"ep": values[0], "etp": values[1]})

    @property
    def schedule_names(self) -> tuple[str, ...]:
        return self.schedules or ("1f1b",)

    def _pipeline_choices(self, pp: int) -> tuple[list[int], list[int]]:
        """(index into `schedule_names`, virtual stages) for a pipeline of pp ranks."""
        fixed = self.said.virtual_stages
        if pp == 1:
            plain = self.schedule_names.index("1f1b") if "1f1b" in self.schedule_names else 0
            return [plain], [fixed or 1]
        codes, stages = [], []
        most = max((self.case.layers + 2) // pp, 2)
        for code, name in enumerate(self.schedule_names):
            kind = SCHEDULES[name].chunks if name in SCHEDULES else "one"
            each = [fixed] if fixed else {"one": [1], "two": [2], "many": list(range(2, most + 1))}[kind]
            codes += [code] * len(each)
            stages += each
        return codes, stages

    def _pipelines(self, grid: Grid) -> None:
        counts, values = choices(grid.columns["pp"], self._pipeline_choices)
        grid.expand("pipeline", counts, {"schedule": values[0], "virtual_stages": values[1]})

    @property
    def sharding_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.shardings, "none")))

    def _splits(self, c: dict[str, IntColumn]) -> IntColumn:
        """0: states have nothing to be split over; 1: context parallel ranks, which may hold whole copies as well; 2: ranks that exist to shard."""
        return np.where(c["dp_shard"] > 1, 2, np.where((c["cp"] > 1) & self.framework.shards_over_cp, 1, 0))

    def _sharding_choices(self, splits: int) -> list[int]:
        if self.said.sharding:
            return [0]
        names = self.sharding_names
        alone = ("none", "zero1") if self.framework.offload_stages.get("optimizer-cpu") and "zero1" in names else ("none",)
        return [i for i, n in enumerate(names) if (n in alone, True, n != "none")[splits]] or [0]

    def _sharding(self, grid: Grid) -> None:
        counts, values = choices(self._splits(grid.columns), lambda d: [self._sharding_choices(d)])
        grid.expand("sharding", counts, {"sharding": values[0]})

    def _sequence_choices(self, tp: int) -> list[int]:
        said = self.said.sequence_parallel
        return ([0] if tp == 1 else [1, 0]) if said is None else [int(said)]

    def _sequence(self, grid: Grid) -> None:
        """Sequence parallelism only, where it is open and possible: it keeps fewer bytes and moves about as many (arXiv:2205.05198).

        What gathers inputs again in backward can make it a percent slower: the ranking prices the best plans without it as well.
        """
        c = grid.columns
        if self.said.sequence_parallel is None and self.advice:
            better = (c["tp"] > 1) & (self.case.job.seq_len % (c["tp"] * c["cp"]) == 0)
            grid.options["sequence"] = np.where(better, 1, grid.options["sequence"])
            worse = int(grid.weight()[better].sum())
            if worse:
                grid.removed[WITHOUT_SP] = worse
            choose = np.where(better, 2, np.where(c["tp"] > 1, 1, 0))
            counts, values = choices(choose, lambda k: [[[0], [1, 0], [1]][k]])
            grid.expand("sequence", counts, {"sequence_parallel": values[0]})
            return
        counts, values = choices(grid.columns["tp"], lambda t: [self._sequence_choices(t)])
        grid.expand("sequence", counts, {"sequence_parallel": values[0]})

    def _table(self, grid: Grid) -> PlanTable:
        first = replace(self.structure, recompute=self.recomputes[0], offload=self.offloads[0])
        structures = tuple(
            replace(first, schedule=schedule, sharding=sharding, sequence_parallel=bool(sp))
            for schedule in self.schedule_names
            for sharding in self.sharding_names
            for sp in (0, 1)
        )
        c = grid.columns
        code = (c["schedule"] * len(self.sharding_names) + c["sharding"]) * 2 + c["sequence_parallel"]
        used, packed = np.unique(code, return_inverse=True)
        return PlanTable(tuple(structures[i] for i in used), packed.reshape(-1).astype(np.int64), **{n: c[n] for n in NUMBERS})

    def _late(self, grid: Grid, table: PlanTable) -> None:
        """Recompute and offload: leaves out what the framework cannot do at all, and counts what single structures refuse."""
        counts = np.bincount(table.structure, minlength=len(table.structures))
        rows_of = dict.fromkeys(self.sharding_names, 0)
        for structure, rows in zip(table.structures, counts, strict=True):
            rows_of[structure.sharding] += int(rows)
        for rule in self.waiting:
            refused = 0
            for sharding, rows in rows_of.items():
                for recompute in self.recomputes if rows else ():
                    for offload in self.offloads:
                        structure = replace(self.structure, sharding=sharding, recompute=recompute, offload=offload)
                        refused += rows * (not allows_structure(self.case, rule, structure))
            if refused:
                grid.removed[rule.name] = grid.removed.get(rule.name, 0) + refused


def late_rules(strategy: StrategySection, advice: bool = True) -> tuple[Rule, ...]:
    """Rules about recompute and offload: they read the structure alone."""
    return tuple(r for r in rules_for(strategy, advice) if set(r.reads) & set(LATE))


def allows_structure(case: Case, rule: Rule, structure: Structure) -> bool:
    """Whether a rule that reads the structure alone allows it."""
    return bool(rule.allows(case, structure, PlanTable.from_plans([ParallelPlan(structure)]))[0])


__all__ = ["Space", "allows_structure", "base_structure", "check_fixed", "enumerate_plans", "fixed_fields", "late_rules", "rules_for"]
