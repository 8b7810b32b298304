"""The search: every plan outlined, what does not fit or cannot win dropped, the best few hundred priced exactly and ranked.

The order is by the objective; plans within `SearchOptions.tie` of the best of their group count as equal, and the simpler one comes first. A plan is simpler
when it uses fewer mechanisms (`mechanisms`), then when fewer GPUs share one copy of the model, then when it is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cost.goodput import reliability
from ..cost.money import steps
from ..cost.table import Column, IntColumn, PlanTable
from ..errors import SpecError, unknown
from ..sharding import SHARDINGS
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan, Structure
from ..spec.run import StrategySection
from .collect import TIGHT, Collector, Kept
from .exact import ExactPass
from .order import families, firsts, ordered
from .pricing import Equations, Pricing, resized
from .rules import Case
from .space import Space, enumerate_plans, late_rules

OBJECTIVES = ("time", "cost", "memory")
BREAKS_DEADLINE = "slower than the deadline"
PROBED = 1_000  # plans of a space from which a small part is priced first
PROBE = 64  # of it
CHUNK = 512  # plans whose memory is computed at once, at first
LOOK = 16_384  # plans, the fastest by their outlines, that are looked at while nobody knows how fast those are that fit
SAME_FAMILY = "a better plan differs in schedule, virtual stages or the split of dp only"
BREAKS_BUDGET = "dearer than the budget"


@dataclass(frozen=True)
class SearchOptions:
    """What is best, and what is allowed.

    * `objective`: time (to train), cost (dollars; GPU-hours where no price is known) or memory (of a GPU).
    * `max_cost` in dollars and `deadline_s` in seconds bound the whole run and need a number of tokens. `max_gpus` lets the search use fewer.
    * `memory_margin`: share of the card kept free, None = the cluster's.
    * `exact`: most plans that get the exact pass. `tie`: relative difference that counts as none.
    * `distinct`: of plans that differ in schedule, virtual stages or the split of data parallelism only, keep the best.
    * `advice`: leave out what would run but be pointless or slow (`Rule.advice`).
    """

    objective: str = "time"
    top: int = 10
    max_cost: float | None = None
    deadline_s: float | None = None
    max_gpus: int | None = None
    memory_margin: float | None = None
    exact: int = 256
    tie: float = 0.01
    distinct: bool = True
    advice: bool = True


@dataclass(frozen=True)
class Ranking:
    """`plans` best first; the other columns belong to its rows. `removed[rule]` counts plans; `searched` is the size of the whole space."""

    plans: PlanTable
    clusters: tuple[ClusterSpec, ...]
    step_s: Column
    breakdown: Mapping[str, Column]
    device_bytes: IntColumn
    value: Column
    removed: dict[str, int]
    searched: int
    reasons: tuple[tuple[str, ...], ...] = ()
    suggestion: str | None = None
    change: Mapping[str, object] = field(default_factory=dict)  # of `suggestion`: section.field -> value

    def __len__(self) -> int:
        return len(self.plans)


def search(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    strategy: StrategySection,
    options: SearchOptions | None = None,
    pricing: type[Equations] | None = None,
) -> Ranking:
    """The open fields of `strategy`, searched whole. Empty, with a `suggestion`, where nothing fits.

    Raises `SpecError` for what is impossible in itself: fixed degrees that do not divide, a deadline without a number of tokens, an unknown objective.
    """
    from .reasons import explain_ranking
    from .suggest import suggest

    options = options or SearchOptions()
    _check(options, cluster, job)
    price = pricing or Equations
    found = rank(model, cluster, job, strategy, options, price)
    if len(found):
        return explain_ranking(model, job, options, found, price)
    return suggest(model, cluster, job, strategy, options, found, price)


def rank(
    model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, strategy: StrategySection, options: SearchOptions, pricing: type[Equations]
) -> Ranking:
    """The ranking alone; advice is given up where it leaves nothing."""
    parts = []
    for gpus in gpu_counts(cluster, options, job.global_batch_size):
        size = resized(cluster, gpus) if gpus != cluster.gpus else cluster
        parts.append(_one_size(Case(model, size, job), strategy, options, pricing(model, size, job)))
    found = _merge(parts, options)
    if not len(found) and options.advice:
        return rank(model, cluster, job, strategy, replace(options, advice=False), pricing)
    return found


def gpu_counts(cluster: ClusterSpec, options: SearchOptions, batch: int = 0) -> list[int]:
    """How many GPUs to try: all; with `max_gpus` the most whole nodes that it allows, the most that divide the batch, and the halves of the largest power
    of two of nodes below."""
    if options.max_gpus is None or (options.max_gpus >= cluster.gpus and options.objective == "time"):
        return [cluster.gpus]
    most = min(options.max_gpus, cluster.gpus)
    node = cluster.gpus_per_node
    unit = 1 if most <= node else node
    units = most // unit
    powers = [2**k for k in range(units.bit_length())]
    even = max((n for n in range(1, units + 1) if batch % (n * unit) == 0), default=units) if batch else units
    counts = sorted({units, *powers}, reverse=True)
    chosen = counts if options.objective != "time" or unit == 1 else counts[:2]
    return sorted({n * unit for n in (*chosen, even)}, reverse=True)


def _check(options: SearchOptions, cluster: ClusterSpec, job: TrainingJob) -> None:
    if options.objective not in OBJECTIVES:
        raise unknown("objective", options.objective, OBJECTIVES, "--objective")
    for name, value in (("--max-cost", options.max_cost), ("--deadline", options.deadline_s)):
        if value is not None and job.tokens is None:
            raise SpecError("needs the number of tokens of the whole run", name, ["--tokens 2T"])
        if value is not None and not value > 0:
            raise SpecError(f"{value} is not above zero", name)
    if options.max_cost is not None and cluster.usd_per_gpu_hour is None:
        raise SpecError(f"no price of {cluster.gpu.id} is known", "--max-cost", ["cluster.usd_per_gpu_hour = 3.0"])
    if options.max_gpus is not None and options.max_gpus < 1:
        raise SpecError(f"{options.max_gpus} GPUs are too few", "--max-gpus", ["1"])
    if options.top < 1:
        raise SpecError(f"{options.top} plans are too few", "--top", ["1"])
    if options.memory_margin is not None and not 0 <= options.memory_margin < 1:
        raise SpecError(f"{options.memory_margin} is not a share between 0 and 1", "--memory-margin", ["0.04"])


def _limits(case: Case, table: PlanTable, options: SearchOptions) -> dict[str, float]:
    """Longest step that keeps the deadline and the budget, in seconds."""
    count = steps(case.job)
    if count is None or not len(table):
        return {}
    kept = reliability(case.model, case.job, table.structures[0], case.cluster.gpus).goodput
    found = {}
    if options.deadline_s is not None:
        found[BREAKS_DEADLINE] = options.deadline_s * kept / count
    if options.max_cost is not None and case.cluster.usd_per_gpu_hour:
        found[BREAKS_BUDGET] = options.max_cost / case.cluster.usd_per_gpu_hour * 3600 / case.cluster.gpus * kept / count
    return found


def _one_size(case: Case, strategy: StrategySection, options: SearchOptions, pricing: Pricing) -> Ranking:
    """The best plans of one number of GPUs."""
    space = enumerate_plans(case, strategy, options.advice)
    limits = _limits(case, space.table, options)
    margin = case.cluster.memory_margin if options.memory_margin is None else options.memory_margin
    by_memory = options.objective == "memory"
    collector = Collector(case, space, pricing, late_rules(strategy, options.advice), margin, not by_memory)
    slowest = min(limits.values(), default=np.inf)
    most = max(options.exact, options.top)
    found = ExactPass(pricing, collector.kept, options.top, most, options.tie, options.distinct, slowest, by_memory)
    limit = np.inf if by_memory else _gather(collector, found)
    if by_memory:
        collector.price(limit, len(space.table) * len(collector.levels))
    collector.close(limit)
    found.finish()
    return _ranking(case, options, space, collector.kept, found, limits)


def _gather(collector: Collector, found: ExactPass) -> float:
    """Collects every plan that may be shown, and returns the seconds of a step that tell which those are.

    How fast the plans are that fit is found out from a small part of the space, the plans of few axes that shard most, then from the fastest; it lowers the
    limit for the rest.
    """
    table = collector.space.table
    if len(table) >= PROBED:
        collector.price(found.slowest, PROBE, among=_likely(table))
        found.look()
    chunk, look = CHUNK, LOOK
    while True:
        limit = min(found.slowest, found.limit())
        near = min(limit, collector.nearest(look))
        count = collector.price(near, chunk)
        found.look()
        if count < chunk and near >= limit:
            break
        chunk, look = (8 * chunk, look) if count >= chunk else (chunk, 8 * look)
    return min(found.slowest, found.limit())


def _likely(table: PlanTable) -> np.ndarray:
    """Plans of few axes that shard most, on the plainest schedule."""
    stage = np.array([SHARDINGS[s.sharding].stage or 0 for s in table.structures])
    plain = np.array([s.schedule == "1f1b" for s in table.structures])
    axes = np.sum([getattr(table, n) > 1 for n in ("tp", "pp", "cp", "dp_replicate")], axis=0)
    return np.asarray((plain & (stage == stage.max()))[table.structure] & (axes <= 1))


def _ranking(case: Case, options: SearchOptions, space: Space, kept: Kept, found: ExactPass, limits: Mapping[str, float]) -> Ranking:
    """What was priced, in order; plans that fit only inside the memory margin where nothing else does."""
    removed = dict(space.removed)
    tight = np.concatenate(kept.tight) if kept.tables else np.zeros(0, dtype=bool)
    if len(tight) and tight.all():
        found.finish(tight=True)
    else:
        kept.credit(TIGHT, tight.sum())
    for name, count in kept.removed.items():
        removed[name] = removed.get(name, 0) + count
    if not len(found.rows):
        return replace(_empty(), removed=removed, searched=space.searched)
    table, _, device, _ = kept.joined()
    keep = np.ones(len(found.rows), dtype=bool)
    for name, limit in limits.items():
        late = keep & (found.step_s > limit)
        removed |= {name: int(late.sum())} if late.any() else {}
        keep &= ~late
    rows = np.flatnonzero(keep)
    value = _value(case, options, table.structures[0], found.step_s[rows], device[found.rows[rows]])
    order = ordered(table.take(found.rows[rows]), value, options.tie)
    if options.distinct and len(order):
        once = firsts(families(table.take(found.rows[rows[order]])))
        removed |= {SAME_FAMILY: len(order) - len(once)} if len(once) < len(order) else {}
        order = order[once]
    rows = rows[order]
    plans = found.rows[rows]
    breakdown = {k: v[rows] for k, v in found.breakdown.items()}
    clusters = (case.cluster,) * len(rows)
    return Ranking(table.take(plans), clusters, found.step_s[rows], breakdown, device[plans], value[order], removed, space.searched)


def _value(case: Case, options: SearchOptions, structure: Structure, step_s: Column, device: IntColumn) -> Column:
    """What is minimized: seconds on the clock a step, GPU-seconds a step, or bytes."""
    if options.objective == "memory":
        return device.astype(float)
    clock = step_s / max(reliability(case.model, case.job, structure, case.cluster.gpus).goodput, 1e-9)
    return clock if options.objective == "time" else clock * case.cluster.gpus


def _merge(parts: Sequence[Ranking], options: SearchOptions) -> Ranking:
    """Rankings of several numbers of GPUs as one, the `top` best."""
    removed: dict[str, int] = {}
    for part in parts:
        for name, count in part.removed.items():
            removed[name] = removed.get(name, 0) + count
    searched = sum(p.searched for p in parts)
    full = [p for p in parts if len(p)]
    if not full:
        return Ranking(_none(), (), np.zeros(0), {}, np.zeros(0, np.int64), np.zeros(0), removed, searched)
    table = PlanTable.concatenate([p.plans for p in full])
    value = np.concatenate([p.value for p in full])
    order = ordered(table, value, options.tie)[: options.top]
    clusters = [c for p in full for c in p.clusters]
    return Ranking(
        table.take(order),
        tuple(clusters[i] for i in order),
        np.concatenate([p.step_s for p in full])[order],
        {k: np.concatenate([p.breakdown[k] for p in full])[order] for k in full[0].breakdown},
        np.concatenate([p.device_bytes for p in full])[order],
        value[order],
        removed,
        searched,
    )


def _none() -> PlanTable:
    return PlanTable.from_plans([ParallelPlan(Structure())]).take(np.zeros(0, dtype=np.intp))


def _empty() -> Ranking:
    return Ranking(_none(), (), np.zeros(0), {}, np.zeros(0, np.int64), np.zeros(0), {}, 0)
