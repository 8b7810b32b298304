"""The ranking against everything priced exactly; order, ties, limits, sentences."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cost.goodput import reliability
from trainwright.cost.money import days
from trainwright.cost.table import PlanTable
from trainwright.errors import SpecError
from trainwright.search.collect import DOMINATED, NOT_FITTING, TOO_SLOW
from trainwright.search.collect import TIGHT as INSIDE_MARGIN
from trainwright.search.order import families, mechanisms, ordered
from trainwright.search.pricing import fits, resized
from trainwright.search.rank import BREAKS_BUDGET, BREAKS_DEADLINE, OBJECTIVES, SAME_FAMILY, Ranking, SearchOptions, gpu_counts, search
from trainwright.search.rules import Case
from trainwright.search.space import enumerate_plans, late_rules
from trainwright.spec.plan import ParallelPlan, Structure
from trainwright.spec.run import StrategySection

from .cases import LLAMA_70B, TINY, Fake, case, cluster, strategy


def find(found: Case, said: StrategySection | None = None, **options: object) -> Ranking:
    return search(found.model, found.cluster, found.job, said or strategy(), SearchOptions(**options), Fake)  # type: ignore[arg-type]


def everything(found: Case, said: StrategySection) -> tuple[PlanTable, np.ndarray, np.ndarray, np.ndarray]:
    """Every legal plan, its exact step, whether it fits with the margin, its memory."""
    space = enumerate_plans(found, said)
    late = late_rules(said)
    tables = []
    for recompute, offload in product(space.recomputes, space.offloads):
        table = space.at(space.table, recompute, offload)
        ok = [all(r.allows(found, s, PlanTable.from_plans([ParallelPlan(s)]))[0] for r in late) for s in table.structures]
        tables.append(table.take(np.array(ok)[table.structure]))
    table = PlanTable.concatenate(tables)
    if space.twins:
        parallel = np.array([s.sequence_parallel for s in table.structures])[table.structure] & (table.tp > 1)
        twins = table.take(parallel)
        plain = replace(twins, structures=tuple(replace(s, sequence_parallel=False) for s in twins.structures))
        table = PlanTable.concatenate([table, plain])
    price = Fake(found.model, found.cluster, found.job)
    need = price.need(table)
    return table, price.exact(table)[0], fits(need, found.cluster, found.cluster.memory_margin)[0], need.device


TIGHT = case(gpus=8, batch=64, seq=512)
LARGE = case(LLAMA_70B, gpus=64, batch=512, seq=8192)


@pytest.mark.parametrize("found", [TIGHT, case(gpus=2, batch=8), case(gpus=12, batch=48), case(gpus=1, batch=4)])
@pytest.mark.parametrize("framework", ["fsdp2", "megatron", "deepspeed"])
def test_the_fastest_are_the_fastest_of_everything(found: Case, framework: str) -> None:
    said = strategy(framework=framework)
    _, step_s, fit, _ = everything(found, said)
    best = np.sort(step_s[fit])[:10]
    if not fit.any():
        pytest.skip("only what is advised against fits")
    got = find(found, said, tie=0.0, distinct=False)
    # what is dominated (recompute where the same plan fits without) is left out, and is never faster
    assert 0 < len(got) <= min(10, fit.sum())
    assert got.step_s[0] == pytest.approx(best[0])
    assert (got.step_s >= best[: len(got)] - 1e-12).all()
    assert (np.diff(got.value) >= 0).all()


def test_the_ten_best_are_complete_where_nothing_is_dominated() -> None:
    said = strategy(recompute="none", offload="none")
    _, step_s, fit, _ = everything(TIGHT, said)
    got = find(TIGHT, said, tie=0.0, distinct=False, top=25)
    assert got.step_s.tolist() == pytest.approx(np.sort(step_s[fit])[:25].tolist())


@pytest.mark.parametrize("framework", ["fsdp2", "megatron", "deepspeed"])
def test_the_smallest_is_the_smallest_of_everything(framework: str) -> None:
    said = strategy(framework=framework)
    _, _, fit, device = everything(TIGHT, said)
    got = find(TIGHT, said, objective="memory", tie=0.0, distinct=False)
    assert got.device_bytes.tolist() == np.sort(device[fit])[:10].tolist()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_first_within_the_tie(objective: str) -> None:
    got = find(LARGE, objective=objective)
    assert len(got) == 10
    leader = np.minimum.accumulate(got.value[::-1])[::-1]
    assert (got.value <= leader * 1.01 + 1e-9).all()


def test_every_plan_is_accounted_for() -> None:
    got = find(TIGHT, top=100_000, exact=100_000, distinct=False)
    assert got.removed[INSIDE_MARGIN] > 0
    assert got.searched == sum(got.removed.values()) + len(got)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1, 2), min_size=1, max_size=30), st.floats(0, 0.2), st.randoms())
def test_order_never_puts_a_clearly_worse_plan_first(values: list[float], tie: float, random: object) -> None:
    plans = [ParallelPlan(Structure(), tp=1 + i % 3, pp=1 + i % 2, dp_shard=1 + i % 5) for i in range(len(values))]
    value = np.array(values)
    order = ordered(PlanTable.from_plans(plans), value, tie)
    assert sorted(order) == list(range(len(values)))
    for a, b in pairwise(order):
        assert value[a] <= value[b] * (1 + tie) * (1 + 1e-12)
    assert value[order[0]] <= value.min() * (1 + tie)


def test_of_equals_the_simpler_comes_first() -> None:
    plain = ParallelPlan(Structure("fsdp2", sharding="zero3"), dp_shard=8)
    split = ParallelPlan(Structure("fsdp2", sharding="zero3", sequence_parallel=True), dp_shard=2, tp=4)
    moved = replace(plain, structure=replace(plain.structure, offload="params-cpu"))
    assert mechanisms(plain) < mechanisms(split) < mechanisms(replace(split, pp=2)) < mechanisms(replace(moved, tp=2, pp=2))
    table = PlanTable.from_plans([split, moved, plain])
    assert ordered(table, np.array([1.0, 1.001, 1.009]), 0.01).tolist() == [2, 0, 1]
    assert ordered(table, np.array([1.0, 1.001, 1.02]), 0.01).tolist() == [0, 1, 2]


def test_one_of_each_family() -> None:
    every, once = find(TIGHT, top=30, distinct=False, tie=0.0), find(TIGHT, top=30, tie=0.0)
    assert len(set(families(once.plans).tolist())) == len(once) == 30
    assert len(set(families(every.plans).tolist())) < 30
    assert once.step_s[0] == every.step_s[0]
    assert once.removed[SAME_FAMILY] > 0


def test_a_deadline_and_a_budget_remove_plans_and_are_kept() -> None:
    free = find(TIGHT, top=50, exact=100_000, distinct=False)
    steps = 1e9 / (512 * 64)
    kept = reliability(TIGHT.model, TIGHT.job, Structure(), 8).goodput
    middle = float(np.median(free.step_s))
    got = find(TIGHT, top=50, exact=100_000, distinct=False, deadline_s=middle * steps / kept)
    assert 0 < len(got) < len(free) or (got.step_s <= middle * (1 + 1e-9)).all()
    assert (got.step_s <= middle * (1 + 1e-9)).all()
    assert got.removed.get(BREAKS_DEADLINE, 0) + got.removed.get(TOO_SLOW, 0) > 0
    dollars = middle * steps / kept / 3600 * 8 * 3.0
    dear = find(TIGHT, top=50, exact=100_000, distinct=False, max_cost=dollars)
    assert (dear.step_s <= middle * (1 + 1e-9)).all()
    assert dear.removed.get(BREAKS_BUDGET, 0) + dear.removed.get(TOO_SLOW, 0) > 0


def test_fewer_gpus_can_be_cheaper_and_stay_inside_the_deadline() -> None:
    got = find(LARGE, objective="cost", max_gpus=64, top=30)
    assert set(got.plans.gpus.tolist()) <= {1, 8, 16, 32, 64}
    assert all(c.gpus == g for c, g in zip(got.clusters, got.plans.gpus, strict=True))
    # the stand-in scales perfectly but for goodput and messages, so the fewest GPUs are the cheapest
    assert got.plans.gpus[0] == got.plans.gpus.min()
    run = days(LARGE.job, got.step_s, np.array([reliability(LARGE.model, LARGE.job, Structure(), c.gpus).goodput for c in got.clusters]))
    assert run is not None
    dollars = run * 24 * got.plans.gpus * 3.0
    assert dollars[0] <= dollars.min() * 1.01
    fast = find(LARGE, objective="cost", max_gpus=64, deadline_s=float(run[0]) * 86400 / 3)
    assert fast.plans.gpus.min() > got.plans.gpus[0]


def test_gpu_counts() -> None:
    assert gpu_counts(cluster(64), SearchOptions()) == [64]
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=100)) == [64]
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=61)) == [56, 32]
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=61, objective="cost")) == [56, 32, 16, 8]
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=5, objective="cost")) == [5, 4, 2, 1]
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=7), 384) == [7, 6, 4, 2, 1]  # 6 divide the batch
    assert gpu_counts(cluster(64), SearchOptions(max_gpus=56), 384) == [56, 48, 32]
    assert resized(cluster(64), 56).nodes == 7
    assert resized(cluster(64), 5).gpus == 5


def test_the_margin_stays_free_where_it_can() -> None:
    roomy = find(TIGHT, memory_margin=0.5)
    assert (roomy.device_bytes <= TIGHT.cluster.gpu.capacity_bytes * 0.5).all()
    one = case(gpus=1, batch=1)
    said = strategy(micro_batch_size=1, recompute="full", offload="optimizer-cpu")
    need = int(find(one, said).device_bytes[0])
    share = 1 - need / one.cluster.gpu.capacity_bytes
    tight = find(one, said, memory_margin=share + 0.01)
    assert len(tight) == 1
    assert "tight" in " ".join(tight.reasons[0])


def test_advice_is_given_up_where_it_leaves_nothing() -> None:
    few = case(gpus=4, batch=2, config=TINY)
    got = find(few, strategy(pp=4, dp=1, recompute="none"))
    assert len(got)
    assert (got.plans.accumulation < 4).all()


def test_what_the_winner_says() -> None:
    got = find(LARGE)
    first = got.reasons[0]
    assert f"{got.searched:,} layouts" in first[0]
    assert first[1].startswith("What limits it: ")
    assert "of a card's 79.6 GiB" in first[2]
    assert first[-1].startswith("The runner-up (")
    assert len(got.reasons) == len(got)
    assert all(len(r) == 1 for r in got.reasons[1:])
    assert all("\n" not in s for r in got.reasons for s in r)


def test_sentences_about_memory_are_true() -> None:
    one = case(gpus=1, batch=16)
    got = find(one, strategy(offload="optimizer-cpu", recompute="none"))
    said = next(s for s in got.reasons[0] if s.startswith("Memory keeps it from more"))
    assert "no offload would need" not in said or "GiB" in said
    bigger = replace(got.plans.plan(0), micro_batch_size=2 * int(got.plans.micro_batch_size[0]))
    need = Fake(one.model, one.cluster, one.job).need(PlanTable.from_plans([bigger]))
    assert (need.device[0] > one.cluster.gpu.capacity_bytes * 0.96) == ("micro-batch" in said)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"objective": "speed"}, "--objective"),
        ({"max_cost": -1.0}, "--max-cost"),
        ({"deadline_s": 0.0}, "--deadline"),
        ({"max_gpus": 0}, "--max-gpus"),
        ({"top": 0}, "--top"),
        ({"memory_margin": 1.0}, "--memory-margin"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], where: str) -> None:
    with pytest.raises(SpecError) as error:
        find(TIGHT, **options)
    assert error.value.where == where


def test_a_deadline_needs_tokens_and_a_budget_a_price() -> None:
    without = Case(TIGHT.model, TIGHT.cluster, replace(TIGHT.job, tokens=None))
    with pytest.raises(SpecError, match="--deadline: needs the number of tokens"):
        find(without, deadline_s=100.0)
    free = Case(TIGHT.model, cluster(8, usd_per_gpu_hour=None), TIGHT.job)
    with pytest.raises(SpecError, match="--max-cost: no price"):
        find(free, max_cost=100.0)


def test_removed_has_words_for_what_pricing_removes() -> None:
    assert {DOMINATED, NOT_FITTING} <= set(find(TIGHT).removed)
