"""Where nothing fits: the cheapest change that would, found by searching with the change made.

Changes are tried from the cheapest kind on: one said field left open, all of them, how the loss is held, the batch, a limit given up, more GPUs. The first
kind that gives a plan is the answer; within a kind the plan that is best by the objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd

from ..cost.goodput import reliability
from ..cost.money import days
from ..errors import SpecError
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.run import MAX_GPUS, StrategySection
from ..units import format_bytes, format_seconds, format_usd
from .pricing import Equations, resized
from .rank import Ranking, SearchOptions, rank

# what is freed together, since one says the other
FREEABLE: tuple[tuple[str, ...], ...] = (
    ("micro_batch_size",),
    ("recompute", "recompute_every", "recompute_modules"),
    ("sharding", "dp_replicate", "dp_shard"),
    ("sequence_parallel",),
    ("virtual_stages", "schedule", "layers_per_stage"),
    ("offload",),
    ("tp", "dp"),
    ("pp", "dp", "virtual_stages", "schedule", "layers_per_stage"),
    ("cp", "dp"),
    ("ep", "etp"),
    ("dp", "dp_replicate", "dp_shard"),
    ("attention",),
)
SEARCHED = tuple(dict.fromkeys(name for group in FREEABLE for name in group))


@dataclass(frozen=True)
class _Try:
    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    strategy: StrategySection
    options: SearchOptions
    pricing: type[Equations]

    def rank(self, **changed: object) -> Ranking | None:
        """The ranking with something changed; None where nothing fits with the margin or the change is impossible."""
        it = replace(self, **changed)  # type: ignore[arg-type]
        try:
            found = rank(it.model, it.cluster, it.job, it.strategy, replace(it.options, top=1, exact=8), it.pricing)
        except SpecError:
            return None
        if not len(found):
            return None
        margin = it.cluster.memory_margin if it.options.memory_margin is None else it.options.memory_margin
        return found if found.device_bytes[0] <= it.cluster.gpu.capacity_bytes * (1 - margin) else None


def suggest(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    strategy: StrategySection,
    options: SearchOptions,
    empty: Ranking,
    pricing: type[Equations],
) -> Ranking:
    """`empty` with `suggestion` and `change`; unchanged where no change that is tried helps."""
    attempt = _Try(model, cluster, job, strategy, options, pricing)
    for kind in (_one_field, _all_fields, _loss, _batch, _limits, _more_gpus):
        found = list(kind(attempt))
        if found:
            ranking, change, text = min(found, key=lambda f: float(f[0].value[0]))
            return replace(empty, suggestion=f"{text}: {outcome(ranking)}", change=change)
    return empty


def outcome(ranking: Ranking) -> str:
    """What the change gives."""
    plan, capacity = ranking.plans.plan(0), ranking.clusters[0].gpu.capacity_bytes
    used = f"{format_bytes(float(ranking.device_bytes[0]))} of {format_bytes(capacity)}"
    return f"{plan}, {format_seconds(float(ranking.step_s[0]))} a step, {used}"


Found = Iterator[tuple[Ranking, Mapping[str, object], str]]


def _freed(strategy: StrategySection, names: tuple[str, ...]) -> StrategySection:
    return strategy.model_copy(update=dict.fromkeys(names))


def _said(strategy: StrategySection, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in names if getattr(strategy, n) is not None)


def _value(ranking: Ranking, name: str) -> object:
    plan = ranking.plans.plan(0)
    return getattr(plan, name) if hasattr(plan, name) else getattr(plan.structure, name)


def _changes(ranking: Ranking, strategy: StrategySection, names: tuple[str, ...]) -> dict[str, object]:
    """What of the said fields `names` the found plan has otherwise."""
    return {f"strategy.{n}": _value(ranking, n) for n in names if getattr(strategy, n) != _value(ranking, n)}


def _text(change: Mapping[str, object], before: Mapping[str, object]) -> str:
    parts = [
        f"without {k}" if v is None else f"{k} = {v}" + (f" instead of {before[k]}" if before.get(k) is not None else "")
        for k, v in change.items()
    ]
    return " and ".join(parts)


def _one_field(it: _Try) -> Found:
    for group in FREEABLE:
        said = _said(it.strategy, group)
        if said and _said(it.strategy, group[:1]):
            found = it.rank(strategy=_freed(it.strategy, group))
            if found:
                change = _changes(found, it.strategy, said)
                yield found, change, _text(change, {f"strategy.{n}": getattr(it.strategy, n) for n in said})


def _all_fields(it: _Try) -> Found:
    said = _said(it.strategy, SEARCHED)
    if len(said) > 1:
        found = it.rank(strategy=_freed(it.strategy, SEARCHED))
        if found:
            change = _changes(found, it.strategy, said)
            yield found, change, _text(change, {f"strategy.{n}": getattr(it.strategy, n) for n in said})


def _loss(it: _Try) -> Found:
    if it.job.loss == "plain":
        found = it.rank(job=replace(it.job, loss="chunked"), strategy=_freed(it.strategy, SEARCHED))
        if found:
            change = {"training.loss": "chunked"} | _changes(found, it.strategy, _said(it.strategy, SEARCHED))
            yield found, change, _text(change, {"training.loss": "plain"})


def _batch(it: _Try) -> Found:
    """The nearest batches that the GPUs, or the part of their number that is not a power of two, divide."""
    gpus, batch = it.cluster.gpus, it.job.global_batch_size
    odd = gpus // (gpus & -gpus)
    for unit in sorted({odd, gpus}):
        if unit == 1 or gcd(batch, unit) == unit:
            continue
        for size in (batch // unit * unit, (batch // unit + 1) * unit):
            found = it.rank(job=replace(it.job, global_batch_size=size)) if size else None
            if found:
                yield found, {"training.global_batch_size": size}, f"training.global_batch_size = {size} instead of {batch}"


def _limits(it: _Try) -> Found:
    """A deadline or budget that nothing meets: what the best plan takes. More GPUs for a deadline are tried after this."""
    if it.options.deadline_s is None and it.options.max_cost is None:
        return
    objective = "time" if it.options.max_cost is None else "cost"
    found = it.rank(options=replace(it.options, deadline_s=None, max_cost=None, objective=objective))
    if not found:
        return
    cluster = found.clusters[0]
    run = days(it.job, float(found.step_s[0]), reliability(it.model, it.job, found.plans.plan(0).structure, cluster.gpus).goodput) or 0.0
    texts = [f"deadline {format_seconds(run * 86400)} on {cluster.gpus:,} GPUs"]
    change: dict[str, object] = {"deadline_s": run * 86400}
    if it.options.max_cost is not None and cluster.usd_per_gpu_hour is not None:
        dollars = run * 24 * cluster.gpus * cluster.usd_per_gpu_hour
        texts.append(f"a budget of {format_usd(dollars)}")
        change["max_cost"] = dollars
    elif it.options.deadline_s is not None:
        more = _fewest_gpus(it)
        if more:
            yield more[0], {"cluster.gpus": more[1]}, f"{more[1]:,} GPUs instead of {it.cluster.gpus:,}"
            return
    yield found, change, " and ".join(texts)


def _more_gpus(it: _Try) -> Found:
    freed = replace(it, strategy=_freed(it.strategy, SEARCHED))
    found = _fewest_gpus(freed)
    if found:
        change: dict[str, object] = {"cluster.gpus": found[1]} | _changes(found[0], it.strategy, _said(it.strategy, SEARCHED))
        yield found[0], change, f"{found[1]:,} {it.cluster.gpu.id} instead of {it.cluster.gpus:,}"


def _fewest_gpus(it: _Try) -> tuple[Ranking, int] | None:
    """The smallest number of GPUs that fits: doubled until it does, then halved between, in whole nodes."""
    have = it.cluster.gpus
    node = it.cluster.gpus_per_node if it.cluster.nodes > 1 else max(it.cluster.gpus_per_node, it.cluster.gpu.gpus_per_node)

    def at(gpus: int) -> Ranking | None:
        return it.rank(cluster=resized(replace(it.cluster, gpus_per_node=node), gpus), options=replace(it.options, max_gpus=None))

    low, high, found = have, have, None
    while found is None and high * 2 <= min(MAX_GPUS, 4096 * have):
        low, high = high, high * 2 if high >= node else min(high * 2, node)
        found = at(high)
    if found is None:
        return None
    best = (found, high)
    unit = node if high > node else 1
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        if middle <= low:
            break
        found = at(middle)
        if found:
            best, high = (found, middle), middle
        else:
            low = middle
    return best
