"""The search on the package's own equations: what it relies on, and what it promises of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import trainwright as tw
from trainwright.api import load
from trainwright.cost.memory import memory
from trainwright.cost.table import PlanTable
from trainwright.resolve import Task, resolve_task
from trainwright.search.bounds import least_device_bytes
from trainwright.search.collect import adds_time
from trainwright.search.pricing import Equations, fits
from trainwright.search.rank import SearchOptions, search
from trainwright.search.rules import Case
from trainwright.search.space import Space, allows_structure, enumerate_plans, late_rules

RUNS = {
    "70B megatron": {"model": "llama-3.1-70b", "cluster": "64xH100", "strategy": {"framework": "megatron"}},
    "70B deepspeed": {"model": "llama-2-70b", "cluster": "64xA100", "strategy": {"framework": "deepspeed"}},
    "70B fsdp2": {"model": "llama-3.1-70b", "cluster": "64xH100", "strategy": {"framework": "fsdp2"}},
    "8B fsdp1": {"model": "llama-3.1-8b", "cluster": "16xH100", "strategy": {"framework": "fsdp1"}},
    "mixture": {"model": "mixtral-8x7b", "cluster": "32xH100", "strategy": {"framework": "megatron", "etp": 1}},
    "fp8": {"model": "qwen3-8b", "cluster": "8xH200", "training": {"precision": "fp8"}, "strategy": {"framework": "megatron"}},
    "odd": {
        "model": "gpt2",
        "cluster": "6xA100-40GB",
        "training": {"seq_len": 1024, "global_batch_size": 48},
        "strategy": {"framework": "deepspeed"},
    },
}


@cache
def prepared(name: str) -> tuple[Task, Case, Space]:
    task = resolve_task(load(RUNS[name]))
    case = Case(task.model, task.cluster, task.job)
    return task, case, enumerate_plans(case, task.spec.strategy, False)


def sample(name: str, recompute: str, offload: str, count: int = 60) -> PlanTable:
    task, case, space = prepared(name)
    table = space.at(space.table, recompute, offload)
    late = late_rules(task.spec.strategy, False)
    legal = np.array([all(allows_structure(case, rule, s) for rule in late) for s in table.structures])[table.structure]
    rows = np.flatnonzero(legal)
    chosen = np.random.default_rng(7).choice(rows, min(count, len(rows)), replace=False)
    return table.take(np.sort(chosen))


def levels(name: str) -> list[tuple[str, str]]:
    _, _, space = prepared(name)
    return [(r, o) for r in space.recomputes for o in space.offloads]


@pytest.mark.parametrize(
    "name", [n if n in ("70B fsdp2", "70B deepspeed", "mixture", "fp8") else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_no_plan_needs_less_than_the_bound(name: str) -> None:
    task, case, _ = prepared(name)
    for level in levels(name):
        table = sample(name, *level)
        if len(table):
            price = Equations(task.model, task.cluster, task.job)
            outline, screened = price.outline(table), price.screen(table)
            assert (price.outlined(outline, table) <= screened * (1 + 1e-9)).all(), level
            assert (price.at_least(outline, table) <= screened * (1 + 1e-9)).all(), level
            need = memory(task.model, task.cluster, task.job, table).device_bytes
            assert (least_device_bytes(case, table) <= need).all(), level


@pytest.mark.parametrize("name", RUNS)
def test_a_limit_changes_no_plan_that_keeps_it(name: str) -> None:
    """With a limit, ranks after the first that breaks it are left out: what fits is exact to the byte, what does not is refused."""
    task, _, _ = prepared(name)
    price, table = Equations(task.model, task.cluster, task.job), sample(name, "none", "none", 80)
    whole = price.need(table).device
    limit = int(np.median(whole))
    some = price.need(table, limit).device
    assert (some[whole <= limit] == whole[whole <= limit]).all()
    assert (some[whole > limit] > limit).all()
    assert (some <= whole).all()


def test_the_bound_refuses_most_of_what_does_not_fit() -> None:
    task, case, _ = prepared("70B megatron")
    table = sample("70B megatron", "none", "none", 300)
    capacity = task.cluster.gpu.capacity_bytes
    misfits = memory(task.model, task.cluster, task.job, table).device_bytes > capacity
    refused = least_device_bytes(case, table) > capacity
    assert not (refused & ~misfits).any()
    assert refused.sum() > 0.8 * misfits.sum()


@pytest.mark.parametrize("name", ["odd", "8B fsdp1", "fp8"])
def test_the_best_are_the_best_of_everything(name: str) -> None:
    """Bounds, chunks and limits leave out nothing: with one recomputation and no offload every plan that fits is priced here; the search shows the first."""
    said = RUNS[name] | {"strategy": RUNS[name]["strategy"] | {"recompute": "full", "offload": "none"}}  # type: ignore[operator]
    task = resolve_task(load(said))
    case = Case(task.model, task.cluster, task.job)
    space = enumerate_plans(case, task.spec.strategy)
    table, price = space.at(space.table, "full", "none"), Equations(task.model, task.cluster, task.job)
    roomy, _ = fits(price.need(table), task.cluster, task.cluster.memory_margin)
    exact = np.sort(price.exact(table.take(roomy))[0])
    found = search(task.model, task.cluster, task.job, task.spec.strategy, SearchOptions(top=15, tie=0.0, distinct=False))
    shown = np.sort(found.step_s)
    assert (shown <= exact[: len(shown)] * (1 + 1e-9)).all()  # plain twins, which the space leaves out, may come before


@pytest.mark.parametrize(
    ("framework", "gpus", "training", "said"),
    [
        ("megatron", "8xH100", {"seq_len": 131072, "global_batch_size": 1}, {"sharding": "zero1"}),  # over context parallel ranks alone
        ("deepspeed", "1xH100", {"seq_len": 512, "global_batch_size": 12}, {"sharding": "zero1", "offload": "optimizer-cpu"}),
    ],
)
def test_no_said_field_finds_a_better_plan(framework: str, gpus: str, training: dict[str, object], said: dict[str, object]) -> None:
    best = []
    for more in ({}, said):
        task = resolve_task(
            load({"model": "llama-3.1-8b", "cluster": gpus, "training": training, "strategy": {"framework": framework, **more}})
        )
        best.append(search(task.model, task.cluster, task.job, task.spec.strategy, SearchOptions(tie=0.0)).step_s[0])
    assert best[0] <= best[1] * (1 + 1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_the_screen_never_exceeds_the_exact_time(name: str) -> None:
    task, _, _ = prepared(name)
    price = Equations(task.model, task.cluster, task.job)
    for level in [("none", "none"), ("full", "none")]:
        table = sample(name, *level, 25)
        screened, (exact, breakdown) = price.screen(table), price.exact(table)
        assert (screened <= exact * (1 + 1e-9)).all()
        assert np.sum(list(breakdown.values()), axis=0) == pytest.approx(exact)


@pytest.mark.parametrize("name", RUNS)
def test_recomputation_and_offload_only_add_time(name: str) -> None:
    """What lets the search skip them where the same plan fits without."""
    task, _, space = prepared(name)
    price = Equations(task.model, task.cluster, task.job)
    base = sample(name, "none", "none", 30)
    times = {(r, o): price.screen(space.at(base, kind, o)) for r, kind in enumerate(space.recomputes) for o in space.offloads}
    for (r_less, less), before in times.items():
        for (r, offload), after in times.items():
            assert not adds_time(r_less, less, r, offload) or (after >= before * (1 - 1e-9)).all(), (r_less, less, r, offload)


def test_recomputation_can_save_time_where_activations_go_to_the_host() -> None:
    """There is less to move: a plan that recomputes what is selected and moves the rest must not be skipped for one that moves everything."""
    task, _, space = prepared("70B fsdp2")
    price = Equations(task.model, task.cluster, task.job)
    base = sample("70B fsdp2", "none", "none", 30)
    everything, less = (price.screen(space.at(base, kind, "activations-cpu")) for kind in ("none", "selective"))
    assert (less < everything).any()
    assert not adds_time(0, "activations-cpu", 1, "activations-cpu")


@pytest.mark.parametrize("name", ["70B megatron", "fp8", "mixture"])
def test_sequence_parallelism_saves_memory_and_costs_little(name: str) -> None:
    """What lets the search price plain tensor parallelism only beside the best plans: never less memory, never 3 % faster."""
    task, _, _ = prepared(name)
    price = Equations(task.model, task.cluster, task.job)
    table = sample(name, "none", "none", 2000)
    with_sp = np.array([s.sequence_parallel for s in table.structures])[table.structure]
    table = table.take(np.flatnonzero(with_sp & (table.tp > 1))[:60])
    plain = replace(table, structures=tuple(replace(s, sequence_parallel=False) for s in table.structures))
    assert len(table) > 20
    assert (price.need(table).device <= price.need(plain).device).all()
    assert (price.screen(table) <= price.screen(plain) * 1.03).all()


@pytest.mark.parametrize("name", ["70B megatron", "8B fsdp1"])
def test_a_row_of_a_table_is_the_estimate_of_its_plan(name: str) -> None:
    task, _, _ = prepared(name)
    table = sample(name, "full", "none", 6)
    price = Equations(task.model, task.cluster, task.job)
    need, (step_s, _) = price.need(table), price.exact(table)
    for i in range(len(table)):
        plan = table.plan(i)
        numbers = {k: getattr(plan, k) for k in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "virtual_stages", "micro_batch_size")}
        said = {
            "framework": plan.structure.framework,
            "sharding": plan.structure.sharding,
            "schedule": plan.structure.schedule,
            "recompute": "full",
            "options": dict(plan.structure.options),
        }
        spec = RUNS[name] | {"strategy": {**said, **numbers, "sequence_parallel": plan.structure.sequence_parallel}}
        spec = spec | {"training": {"global_batch_size": task.job.global_batch_size}}
        estimate = tw.estimate(spec)
        assert estimate.device_bytes == need.device[i]
        assert estimate.step_s == pytest.approx(step_s[i], rel=1e-6)


def test_plan_end_to_end() -> None:
    plans = tw.plan(RUNS["70B megatron"] | {"training": {"tokens": 1e12}}, top=5)
    assert len(plans) == 5
    assert all(p.fits for p in plans)
    assert plans[0].step_s <= min(p.step_s for p in plans) * 1.01
    assert sum(plans.removed.values()) < plans.searched
    again = tw.estimate(plans[0].to_dict()["spec"])
    assert (again.step_s, again.device_bytes) == (plans[0].step_s, plans[0].device_bytes)


def test_plans_on_fewer_gpus_are_priced_on_fewer_gpus() -> None:
    spec = RUNS["8B fsdp1"] | {"training": {"tokens": 1e11}}
    plans = tw.plan(spec, top=10, objective="cost", max_gpus=16)
    sizes = {p.plan.gpus for p in plans}
    assert sizes <= {2, 4, 8, 16}
    for p in plans:
        assert p.cluster.gpus == p.plan.gpus
        assert p.to_dict()["spec"]["cluster"]["nodes"] * p.to_dict()["spec"]["cluster"]["gpus_per_node"] == p.plan.gpus


def test_nothing_fits_and_what_would() -> None:
    plans = tw.plan({"model": "llama-3.1-70b", "cluster": "4xA100-40GB", "strategy": {"framework": "megatron", "offload": "none"}})
    assert len(plans) == 0
    assert plans.suggestion
    assert plans.searched == sum(plans.removed.values())


def test_a_rank_alone_without_sharding_is_bound_by_its_16_bit_weights() -> None:
    """FSDP2 wraps nothing there: neither one fp32 copy nor gradients in the reduced type. Layers so large that no constant hides a gigabyte."""
    shape = {"hidden_size": 8192, "num_hidden_layers": 20, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    model = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **shape}
    training = {"seq_len": 2048, "global_batch_size": 6, "gradient_dtype": "bf16", "loss": "fused"}
    strategy = {"framework": "fsdp2", "sharding": "none", "pp": 2, "dp": 1, "micro_batch_size": 1}
    task = resolve_task(load({"model": model, "cluster": "2xH100", "training": training, "strategy": strategy}))
    case = Case(task.model, task.cluster, task.job)
    space = enumerate_plans(case, task.spec.strategy)
    for offload in ("none", "optimizer-cpu"):
        table = space.at(space.table, "full", offload)
        assert len(table)
        assert (least_device_bytes(case, table) <= memory(task.model, task.cluster, task.job, table).device_bytes).all()
