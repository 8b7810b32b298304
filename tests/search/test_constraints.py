"""A constraint is one entry: its mask, its sentence and the values that it offers say the same, for any plan."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cost.table import PlanTable
from trainwright.errors import SpecError
from trainwright.search.constraints import ADVICE, ERRORS, RULES, advise, allowed, broken, check_plan, violations
from trainwright.search.rules import CHOICES, Case, explain, mask, with_field
from trainwright.spec.plan import NUMBERS, ParallelPlan, Structure

from .cases import LLAMA_70B, MIXTURE, TINY, V100, case
from .oracle import ORACLE

DEGREE = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 6, 8, 12, 16, 64])
PRECISION = st.sampled_from(["bf16", "fp16", "fp32", "fp8", "fp4"])
STRUCTURE = st.builds(
    Structure,
    framework=st.sampled_from(["megatron", "fsdp2", "fsdp1", "ddp", "deepspeed"]),
    sharding=st.sampled_from(CHOICES["sharding"]),
    sequence_parallel=st.booleans(),
    cp_kind=st.sampled_from(["ring", "allgather", "ulysses"]),
    async_tp=st.booleans(),
    schedule=st.sampled_from(CHOICES["schedule"]),
    recompute=st.sampled_from(CHOICES["recompute"]),
    recompute_modules=st.sampled_from([(), ("mlp",)]),
    attention=st.sampled_from(CHOICES["attention"]),
    offload=st.sampled_from(CHOICES["offload"]),
    fp8_params=st.booleans(),
    layers_per_stage=st.sampled_from([None, (3, 3), (6,), (2, 1, 2, 1)]),
)
PLAN = st.builds(ParallelPlan, STRUCTURE, **dict.fromkeys(NUMBERS, DEGREE))
CASE = st.builds(
    case,
    st.sampled_from([TINY, MIXTURE, LLAMA_70B]),
    gpus=st.sampled_from([1, 7, 8, 12, 64, 256]),
    batch=st.sampled_from([1, 8, 15, 64, 512]),
    seq=st.sampled_from([128, 500, 512, 8192]),
    precision=PRECISION,
    optimizer_in_backward=st.booleans(),
) | st.builds(case, gpu=st.just(V100), precision=PRECISION)


def near(found: Case, plan: ParallelPlan) -> ParallelPlan:
    """The plan with data parallelism and accumulation that fit, where that is possible: so that rules are not always drowned by the first."""
    return with_field(found, plan, "tp", plan.tp)


def test_every_rule_has_its_oracle_and_a_name_of_its_own() -> None:
    assert [r.name for r in RULES] == list(dict.fromkeys(r.name for r in RULES))
    assert set(ORACLE) == {r.name for r in RULES}


@settings(max_examples=400, deadline=None)
@given(CASE, PLAN, st.booleans())
def test_masks_equal_the_plain_rules(found: Case, plan: ParallelPlan, adapt: bool) -> None:
    plan = near(found, plan) if adapt else plan
    row = PlanTable.from_plans([plan])
    for rule in RULES:
        assert rule.allows(found, plan.structure, row)[0] == ORACLE[rule.name](found, plan), rule.name


@settings(max_examples=60, deadline=None)
@given(CASE, st.lists(PLAN, min_size=2, max_size=12))
def test_a_table_is_judged_row_by_row(found: Case, plans: list[ParallelPlan]) -> None:
    table = PlanTable.from_plans(plans)
    assert mask(found, RULES, table).tolist() == [not broken(found, p) for p in plans]
    assert allowed(found, table).tolist() == [not broken(found, p, ERRORS) for p in plans]


@settings(max_examples=80, deadline=None)
@given(CASE, PLAN, st.booleans())
def test_sentences_name_the_numbers_and_values_that_the_rule_allows(found: Case, plan: ParallelPlan, adapt: bool) -> None:
    plan = near(found, plan) if adapt else plan
    for violation in violations(found, plan):
        rule = violation.rule
        assert violation.sentence
        assert "\n" not in violation.sentence
        for value in violation.nearest:
            name = violation.where.removeprefix("strategy.")
            better = with_field(found, plan, name, value)
            assert rule.allows(found, better.structure, PlanTable.from_plans([better]))[0], (rule.name, value)


@settings(max_examples=150, deadline=None)
@given(CASE, PLAN, PLAN)
def test_a_rule_reads_only_what_it_says(found: Case, plan: ParallelPlan, other: ParallelPlan) -> None:
    for rule in RULES:
        numbers = {n: getattr(plan if n in rule.reads else other, n) for n in NUMBERS}
        same = {
            k: getattr(plan.structure, k)
            for k in ("framework", "cp_kind", "layers_per_stage", *(r for r in rule.reads if r not in NUMBERS))
        }
        mixed = ParallelPlan(replace(other.structure, **same), **numbers)
        one, two = (rule.allows(found, p.structure, PlanTable.from_plans([p]))[0] for p in (plan, mixed))
        assert one == two, rule.name


@settings(max_examples=100, deadline=None)
@given(CASE, PLAN, st.booleans())
def test_check_plan_refuses_exactly_what_the_errors_refuse(found: Case, plan: ParallelPlan, adapt: bool) -> None:
    plan = near(found, plan) if adapt else plan
    wrong = broken(found, plan, ERRORS)
    if not wrong:
        check_plan(found.model, found.cluster, found.job, plan)
        assert len(advise(found.model, found.cluster, found.job, plan)) == len(broken(found, plan, ADVICE))
        return
    with pytest.raises(SpecError) as error:
        check_plan(found.model, found.cluster, found.job, plan)
    assert error.value.message == wrong[0].sentence(found, plan)


GOOD = ParallelPlan(Structure("megatron", sharding="zero1", sequence_parallel=True), dp_shard=4, tp=2, pp=1, accumulation=4)
FOUND = case(gpus=8, batch=16, seq=512)
EXAMPLES = {
    "degrees multiply to the GPU count": (
        replace(GOOD, dp_shard=3, accumulation=1),
        "strategy.dp",
        "dp 3 x tp 2 x pp 1 x cp 1 = 6, but the cluster has 8 GPUs",
        "4",
    ),
    "tp divides the attention heads": (
        replace(GOOD, tp=3, dp_shard=1),
        "strategy.tp",
        "tp 3 does not divide 8 attention heads",
        "1, 2, 4, 8",
    ),
    "dp divides the global batch": (
        replace(GOOD, micro_batch_size=3),
        "strategy.micro_batch_size",
        "dp 4 x micro-batch 3 does not divide the global batch of 16 sequences",
        "1, 2, 4",
    ),
    "pipeline stages hold something": (
        replace(GOOD, pp=16),
        "strategy.pp",
        "pp 16 x virtual_stages 1 = 16 stages are more than 6 layers, embedding and head (8 slots)",
        "7, 8",
    ),
    "cp divides the sequence": (
        replace(GOOD, cp=3),
        "strategy.cp",
        "ring context parallelism gives a rank two pieces: 2 x cp 3 does not divide sequence length 512",
        "1, 2, 4, 8",
    ),
    "experts divide over ep": (replace(GOOD, ep=2), "strategy.ep", "ep 2 spreads experts, and the model has none", "1"),
    "virtual stages need a pipeline": (
        replace(GOOD, virtual_stages=2),
        "strategy.virtual_stages",
        "2 virtual stages need a pipeline, and pp is 1",
        "1",
    ),
    "the framework has the sharding": (
        with_field(FOUND, GOOD, "sharding", "zero3"),
        "strategy.sharding",
        "Megatron-Core has no sharding 'zero3'; it has none, zero1",
        "zero1",
    ),
    "the framework has the offload": (
        with_field(FOUND, GOOD, "offload", "params-nvme"),
        "strategy.offload",
        "Megatron-Core cannot offload params-nvme; it can none, optimizer-cpu, activations-cpu",
        "none, optimizer-cpu, activations-cpu",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_person_reads(name: str) -> None:
    plan, where, sentence, nearest = EXAMPLES[name]
    rule = next(r for r in RULES if r.name == name)
    said = explain(FOUND, rule, plan, ERRORS)
    assert (said.where, said.sentence, ", ".join(map(str, said.nearest))) == (where, sentence, nearest)


def test_interleaving_names_the_schedules_own_rule() -> None:
    plan = replace(
        GOOD, pp=4, tp=1, dp_shard=2, accumulation=6, virtual_stages=2, structure=replace(GOOD.structure, schedule="interleaved-1f1b")
    )
    rule = next(r for r in RULES if r.name == "the schedule has an order")
    assert re.search("groups of 4 microbatches.* 6 do not divide", rule.sentence(FOUND, plan))


def test_key_value_heads_are_replicated_where_the_framework_does() -> None:
    found = case(gpus=8)
    eight = ParallelPlan(Structure("megatron", sharding="none"), tp=8, accumulation=16)
    check_plan(found.model, found.cluster, found.job, eight)
    with pytest.raises(SpecError, match="tp 8 does not divide 4 key-value heads, and PyTorch FSDP2"):
        check_plan(found.model, found.cluster, found.job, with_field(found, eight, "framework", "fsdp2"))


def test_old_hardware() -> None:
    old = case(gpu=V100, gpus=1, precision="fp8")
    with pytest.raises(SpecError, match=r"training.precision: V100-SXM2-32GB has no fp8 matrix units; it has fp32, fp16"):
        check_plan(old.model, old.cluster, old.job, ParallelPlan(Structure(sharding="none"), accumulation=16))
    advice = advise(old.model, old.cluster, replace(old.job, precision="bf16"), ParallelPlan(Structure(sharding="none"), accumulation=16))
    assert [a.split(":")[0] for a in advice] == ["training.precision", "strategy.attention"]
    assert "better: efficient" in advice[1]


def test_layers_per_stage_must_deal_all_layers() -> None:
    found = case(gpus=2)
    plan = ParallelPlan(Structure("fsdp2", sharding="none", layers_per_stage=(2, 3)), pp=2, accumulation=16)
    told = r"strategy.layers_per_stage: deals 5 layers over 2 stages; the model has 6 and the plan 2 \(nearest: \[3, 3\]\)"
    with pytest.raises(SpecError, match=told):
        check_plan(found.model, found.cluster, found.job, plan)
    check_plan(found.model, found.cluster, found.job, with_field(found, plan, "layers_per_stage", (4, 2)))


def test_large_numbers_do_not_break_the_search_for_near_values() -> None:
    found = case(gpus=8)
    plan = ParallelPlan(Structure("megatron", sharding="none"), tp=9_999_991)
    with pytest.raises(SpecError) as error:
        check_plan(found.model, found.cluster, found.job, plan)
    assert error.value.nearest
    assert np.all([int(v) > 0 for v in error.value.nearest.split(", ")])
