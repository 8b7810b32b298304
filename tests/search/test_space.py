"""The space as columns is the space as loops, and every plan that is missing is counted under the rule that took it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.frameworks import FRAMEWORKS
from trainwright.schedules import SCHEDULES
from trainwright.search.constraints import ADVICE, ERRORS, broken
from trainwright.search.rules import Case
from trainwright.search.space import WITHOUT_SP, enumerate_plans, rules_for
from trainwright.spec.plan import NUMBERS, ParallelPlan, Structure
from trainwright.spec.run import StrategySection

from .cases import MIXTURE, TINY, case, strategy
from .oracle import alone, facts

PAIR = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def whole(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def every_plan(found: Case, framework: str) -> Iterator[ParallelPlan]:
    """The space by its description, in nested loops: one row for each recompute and offload."""
    f, gpus, batch = FRAMEWORKS[framework], found.cluster.gpus, found.job.global_batch_size
    experts, layers = facts(found)["experts"], facts(found)["layers"]
    for tp, pp, cp, replicate in product(whole(gpus), repeat=4):
        if gpus % (tp * pp * cp * replicate):
            continue
        shard = gpus // (tp * pp * cp * replicate)
        share, left = divmod(batch, replicate * shard)
        for micro in [1] if left else whole(share):
            numbers = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "pp": pp, "cp": cp, "micro_batch_size": micro}
            numbers["accumulation"] = max(1, batch // (replicate * shard) // micro)
            for ep, etp in product(whole(experts) if experts and "ep" in f.axes else [1], whole(tp) if experts else [1]):
                for schedule, virtual in pipelines(f.schedules, pp, layers):
                    whole_copies = shard == 1
                    cut = shard > 1 or (cp > 1 and framework != "ddp")
                    some = [s for s in f.shardings if s != "none"] if cut else list(alone(framework)[1:])
                    for sharding in ["none"] * whole_copies + some:
                        for parallel in [False] if tp == 1 else [True, False]:
                            structure = Structure(framework, sharding=sharding, schedule=schedule, sequence_parallel=parallel)
                            for recompute, offload in product(("none", "selective", "full"), f.offloads):
                                late = replace(structure, recompute=recompute, offload=offload)
                                yield ParallelPlan(late, ep=ep, etp=etp, virtual_stages=virtual, **numbers)


def pipelines(schedules: tuple[str, ...], pp: int, layers: int) -> list[tuple[str, int]]:
    if pp == 1 or not schedules:
        return [("1f1b", 1)]
    found = []
    for name in schedules:
        chunks = {"one": [1], "two": [2], "many": range(2, max((layers + 2) // pp, 2) + 1)}[SCHEDULES[name].chunks]
        found += [(name, v) for v in chunks]
    return found


def rows(found: Case, said: StrategySection, advice: bool) -> tuple[set[tuple[object, ...]], dict[str, int], int]:
    space = enumerate_plans(found, said, advice)
    plans = set()
    late = [r for r in rules_for(said, advice) if {"offload", "recompute", "recompute_modules"} & set(r.reads)]
    for recompute, offload in product(space.recomputes, space.offloads):
        table = space.at(space.table, recompute, offload)
        for i in range(len(table)):
            plan = table.plan(i)
            if not broken(found, plan, tuple(late)):
                plans.add(key(plan))
    return plans, space.removed, space.searched


def key(plan: ParallelPlan) -> tuple[object, ...]:
    s = plan.structure
    return (*(getattr(plan, n) for n in NUMBERS), s.sharding, s.schedule, s.sequence_parallel, s.recompute, s.offload)


SMALL = [
    (TINY, 1, 4, 512, "fsdp2"),
    (TINY, 2, 6, 512, "megatron"),
    (TINY, 3, 6, 512, "fsdp2"),
    (TINY, 5, 10, 512, "deepspeed"),
    (TINY, 7, 14, 512, "fsdp2"),
    (TINY, 6, 12, 384, "megatron"),
    (TINY, 8, 8, 512, "deepspeed"),
    (TINY, 4, 6, 100, "fsdp2"),
    (TINY, 8, 4, 512, "ddp"),
    (TINY, 8, 4, 512, "fsdp1"),
    (MIXTURE, 4, 4, 512, "megatron"),
    (MIXTURE, 3, 3, 512, "fsdp2"),
]


@pytest.mark.parametrize(("config", "gpus", "batch", "seq", "framework"), SMALL)
@pytest.mark.parametrize("advice", [True, False])
def test_columns_are_the_loops(config: dict[str, object], gpus: int, batch: int, seq: int, framework: str, advice: bool) -> None:
    found = case(config, gpus=gpus, batch=batch, seq=seq)
    rules = ERRORS + tuple(r for r in ADVICE if advice and r.fields)
    plans = list(every_plan(found, framework))
    assert len(plans) == len({key(p) for p in plans})

    def kept(p: ParallelPlan) -> bool:
        pointless = advice and p.tp > 1 and not p.structure.sequence_parallel and seq % (p.tp * p.cp) == 0
        return not pointless and not broken(found, p, rules)

    expected = {key(p) for p in plans if kept(p)}
    got, removed, searched = rows(found, strategy(framework=framework), advice)
    assert got == expected
    assert searched == len(plans)
    assert searched == len(expected) + sum(removed.values())
    assert set(removed) <= {r.name for r in rules} | {WITHOUT_SP}
    assert all(n > 0 for n in removed.values())


@cache
def everything(family: str, gpus: int, framework: str) -> set[tuple[object, ...]]:
    """The whole space of one of the two models, where nothing is said."""
    config = next(c for c in (TINY, MIXTURE) if c["model_type"] == family)
    return rows(case(config, gpus=gpus, batch=12), strategy(framework=framework), False)[0]


@pytest.mark.parametrize(("config", "gpus", "framework"), [(TINY, 8, "fsdp2"), (MIXTURE, 4, "megatron"), (TINY, 6, "deepspeed")])
@pytest.mark.parametrize(
    "said",
    [
        {"tp": 2},
        {"pp": 2},
        {"dp": 2},
        {"dp_shard": 2},
        {"dp_replicate": 2, "tp": 1},
        {"sharding": "none"},
        {"recompute": "full", "offload": "none"},
        {"micro_batch_size": 2},
        {"sequence_parallel": False},
        {"pp": 2, "schedule": "1f1b"},
        {"cp": 2},
    ],
)
def test_what_is_said_selects_from_the_same_space(config: dict[str, object], gpus: int, framework: str, said: dict[str, object]) -> None:
    found = case(config, gpus=gpus, batch=12)
    free = everything(str(config["model_type"]), gpus, framework)
    fixed, _, _ = rows(found, strategy(framework=framework, **said), False)

    def agrees(plan: tuple[object, ...]) -> bool:
        named = dict(zip((*NUMBERS, "sharding", "schedule", "sequence_parallel", "recompute", "offload"), plan, strict=True))
        named["dp"] = named["dp_replicate"] * named["dp_shard"]  # type: ignore[operator]
        return all(named[k] == v for k, v in said.items())

    assert fixed == {p for p in free if agrees(p)}
    assert fixed


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.sampled_from([8, 60, 512]), st.sampled_from(["fsdp2", "megatron", "deepspeed", "ddp"]))
def test_every_row_is_legal_and_the_counts_add_up(gpus: int, batch: int, framework: str) -> None:
    found = case(gpus=gpus, batch=batch)
    space = enumerate_plans(found, strategy(framework=framework, recompute="none", offload="none"))
    assert (space.table.gpus == gpus).all()
    assert (space.table.dp * space.table.micro_batch_size * space.table.accumulation == batch).all()
    for i in np.linspace(0, len(space.table) - 1, min(len(space.table), 12)).astype(int):
        assert not broken(found, space.table.plan(int(i)), ERRORS)
    assert space.searched == len(space.table) + sum(space.removed.values())


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"tp": 3}, "strategy.tp"),
        ({"dp": 5}, "strategy.dp"),
        ({"tp": 4, "pp": 4}, "strategy.pp"),
        ({"tp": 8, "framework": "fsdp2"}, "strategy.tp"),
        ({"ep": 2}, "strategy.ep"),
        ({"sharding": "zero2", "framework": "megatron"}, "strategy.sharding"),
        ({"offload": "params-nvme", "framework": "megatron"}, "strategy.offload"),
        ({"pp": 2, "schedule": "dualpipe", "framework": "megatron"}, "strategy.schedule"),
        ({"dp": 8, "micro_batch_size": 3}, "strategy.micro_batch_size"),
    ],
)
def test_what_can_never_be_right_is_refused(said: dict[str, object], where: str) -> None:
    with pytest.raises(SpecError) as error:
        enumerate_plans(case(gpus=8), strategy(**said))
    assert error.value.where == where


def test_a_prime_number_of_gpus_still_has_plans() -> None:
    space = enumerate_plans(case(gpus=61, batch=61 * 4), strategy())
    assert len(space.table)
    assert set(np.unique(space.table.dp)) == {61}


def test_a_degree_that_the_user_said_is_not_subject_to_advice() -> None:
    found = case(gpus=16, batch=16, config=TINY | {"num_attention_heads": 16, "num_key_value_heads": 16})
    assert not (enumerate_plans(found, strategy()).table.tp == 16).any()
    assert (enumerate_plans(found, strategy(tp=16)).table.tp == 16).all()


def test_attention_that_the_gpu_runs() -> None:
    from .cases import V100

    old = enumerate_plans(case(gpu=V100, gpus=2, precision="fp16"), strategy())
    assert {s.attention for s in old.table.structures} == {"efficient"}
    assert {s.attention for s in enumerate_plans(case(gpus=2), strategy()).table.structures} == {"flash"}
