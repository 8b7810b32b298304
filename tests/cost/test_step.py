"""The step: parts sum, the screen stays below the exact pass, levers move time the way they do on real machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cost.step import PARTS, exact, screen
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.schedules import SCHEDULES
from trainwright.spec.plan import ParallelPlan, Structure

from .parts import A100, H100, cluster, gpt, job, llama, plan, timed

MEGATRON = Structure(framework="megatron", sharding="zero1", sequence_parallel=True, framework_date="2025-06")
FSDP = Structure(framework="fsdp2", sharding="zero3", framework_date="2025-06")


def many_plans() -> list[ParallelPlan]:
    """Layouts of 64 GPUs for 128 sequences."""
    found = []
    for structure, tp, pp, micro in product((MEGATRON, FSDP, replace(MEGATRON, recompute="full")), (1, 2, 8), (1, 2, 4), (1, 2)):
        shape = {"tp": tp, "pp": pp, "dp_shard": 64 // (tp * pp)}
        found.append(plan(128, micro=micro, structure=structure, **shape))
        if pp > 1 and structure.framework == "megatron":
            found.append(plan(128, micro=micro, structure=replace(structure, schedule="interleaved-1f1b"), virtual_stages=2, **shape))
    return [p for p in found if p.accumulation and (p.virtual_stages == 1 or p.accumulation % p.pp == 0)]


@pytest.fixture(scope="module")
def tables():  # type: ignore[no-untyped-def]
    model, on, what = llama(), cluster(8), job(8192, 128)
    table = PlanTable.from_plans(many_plans())
    messages = traffic(model, on, what, table)
    return table, screen(model, on, what, table, messages), exact(model, on, what, table, messages)


def test_the_breakdown_sums_to_the_step(tables) -> None:  # type: ignore[no-untyped-def]
    for times in tables[1:]:
        assert tuple(times.breakdown) == PARTS
        assert np.allclose(sum(times.breakdown.values()), times.step_s, rtol=1e-12)
        assert all((column >= 0).all() for column in times.breakdown.values())


def test_the_screen_never_exceeds_the_exact_pass(tables) -> None:  # type: ignore[no-untyped-def]
    table, quick, full = tables
    assert len(table) > 60
    assert (quick.step_s <= full.step_s * (1 + 1e-9)).all()
    assert np.median(quick.step_s / full.step_s) > 0.97


def test_rows_do_not_depend_on_their_table(tables) -> None:  # type: ignore[no-untyped-def]
    table, _, full = tables
    for i in (0, 17, len(table) - 1):
        alone = timed(llama(), cluster(8), job(8192, 128), table.plan(i))
        assert alone.step_s[0] == pytest.approx(full.step_s[i], rel=1e-12)


def test_exposed_seconds_are_part_of_all_seconds(tables) -> None:  # type: ignore[no-untyped-def]
    for whole, shown in zip(tables[2].message_seconds, tables[2].exposed_seconds, strict=True):
        assert (shown <= whole * (1 + 1e-9)).all()


def test_terms_sum_to_the_step(tables) -> None:  # type: ignore[no-untyped-def]
    full = tables[2]
    for i in (0, 11, 40):
        found = full.terms(i)
        assert sum(t.seconds for t in found) == pytest.approx(full.step_s[i], rel=1e-9)
        assert all(t.source and t.formula for t in found)


def test_the_interval_holds_the_step(tables) -> None:  # type: ignore[no-untyped-def]
    full = tables[2]
    assert (full.low_s < full.step_s).all()
    assert (full.step_s < full.high_s).all()


@given(scale=st.sampled_from([2, 4]), micro=st.sampled_from([1, 2]))
@settings(max_examples=8, deadline=None)
def test_more_micro_batches_cost_in_proportion(scale: int, micro: int) -> None:
    one = timed(llama(layers=8), cluster(1), job(4096, 16), plan(16, micro=micro, structure=FSDP, dp_shard=8)).step_s[0]
    more = timed(llama(layers=8), cluster(1), job(4096, 16 * scale), plan(16 * scale, micro=micro, structure=FSDP, dp_shard=8)).step_s[0]
    assert 0.9 * scale * one < more <= scale * one


def test_recomputation_costs_about_a_third_of_what_it_repeats() -> None:
    model, what = llama(), job(8192, 64)
    none, full = timed(
        model, cluster(1), what, *(plan(64, structure=replace(MEGATRON, recompute=r), dp_shard=8) for r in ("none", "full"))
    ).step_s
    assert 1.2 < full / none < 1.36


def test_the_bubble_follows_its_formula() -> None:
    """Equal stages without ends: bubble / work near (p-1)/m."""
    model, what = gpt(32, 4096, 32, vocab=128), job(2048, 64)
    t = timed(model, cluster(4), what, plan(64, structure=MEGATRON, pp=4, dp_shard=8))
    assert t.breakdown["bubble"][0] / t.breakdown["compute"][0] == pytest.approx(3 / 8, rel=0.1)


def test_interleaving_shrinks_the_bubble() -> None:
    model, what = llama(), job(4096, 64)
    plain, chunked = timed(
        model,
        cluster(4),
        what,
        plan(64, structure=MEGATRON, pp=4, dp_shard=8),
        plan(64, structure=replace(MEGATRON, schedule="interleaved-1f1b"), pp=4, dp_shard=8, virtual_stages=4),
    ).breakdown["bubble"]
    assert chunked < 0.5 * plain


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    model, what = llama(), job(4096, 64)
    inside, across = timed(model, cluster(2), what, *(plan(64, structure=MEGATRON, tp=tp, dp_shard=16 // tp) for tp in (8, 16))).breakdown[
        "tp_comm"
    ]
    assert across > 2 * inside


def test_a_slower_network_never_helps() -> None:
    model, what = llama(), job(4096, 64)
    p = plan(64, structure=FSDP, dp_shard=64)
    fast, slow = (timed(model, cluster(8, gbps=g), what, p).step_s[0] for g in (400, 50))
    assert slow > fast


def test_small_models_are_bound_by_launches() -> None:
    """A layer of 512 on one sequence of 128 takes the host longer than the card; CUDA graphs take that away."""
    model, what = gpt(24, 512, 8, vocab=1024), job(128, 8)
    host, graphs = timed(
        model, cluster(1), what, *(plan(8, structure=replace(MEGATRON, cuda_graphs=g), dp_shard=8) for g in (False, True))
    ).breakdown["other"]
    assert host > graphs + 0.01


def test_zero3_fetches_every_weight_of_a_small_model() -> None:
    """DeepSpeed's ZeRO-3 takes and returns each weight in Python: in three passes with full recomputation, in two without; a large layer hides it."""
    small, large = gpt(24, 512, 8, vocab=1024), gpt(24, 16384, 128, vocab=1024)
    plans = [
        plan(8, structure=Structure(framework="deepspeed", sharding=sharding, recompute=recompute, framework_date="2025-06"), dp_shard=8)
        for recompute in ("none", "full")
        for sharding in ("zero2", "zero3")
    ]
    fetch = 24 * len(small.counts[0][0].weights) * 3e-4
    for model, what, within in ((small, job(128, 8), (0.7, 1.1)), (large, job(4096, 8), (-0.2, 0.2))):
        two, three, two_again, three_again = timed(model, cluster(1), what, *plans).breakdown["other"]
        assert within[0] < (three - two) / (2 * fetch) < within[1]
        assert within[0] < (three_again - two_again) / (3 * fetch) < within[1]


def test_fp8_is_faster_on_hopper_and_not_on_ampere() -> None:
    model = llama()
    p = plan(64, structure=MEGATRON, tp=2, dp_shard=4)
    hopper = [timed(model, cluster(1), job(8192, 64, precision=q), p).step_s[0] for q in ("bf16", "fp8")]
    ampere = [timed(model, cluster(1, A100), job(8192, 64, precision=q), p).step_s[0] for q in ("bf16", "fp8")]
    assert hopper[1] < 0.9 * hopper[0]
    assert ampere[1] >= ampere[0]


def test_offload_costs_time() -> None:
    model, what = llama(), job(4096, 64)
    stays, goes = timed(
        model, cluster(1), what, *(plan(64, structure=replace(FSDP, offload=o), dp_shard=8) for o in ("none", "optimizer-cpu"))
    ).step_s
    assert goes > stays


def test_a_relative_card_says_so_and_widens_its_interval() -> None:
    stranger = replace(H100, id="X1", arch="9.9")
    known, strange = (timed(llama(), cluster(1, g), job(4096, 64), plan(64, structure=FSDP, dp_shard=8)) for g in (H100, stranger))
    assert strange.notes(0)
    assert not known.notes(0)
    assert strange.high_s[0] / strange.step_s[0] > known.high_s[0] / known.step_s[0]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("layers", "pp", "batch"), [(30, 4, 128), (61, 4, 512), (14, 2, 64)])
def test_every_schedule_stays_above_its_bound(name: str, layers: int, pp: int, batch: int) -> None:
    """Uneven stages, embedding and head on the ends, every placement: the replay never beats the screen, and parts sum."""
    virtual = 1 if SCHEDULES[name].chunks == "one" else 2
    structure = replace(MEGATRON, schedule=name)
    p = plan(batch, structure=structure, pp=pp, dp_shard=8, virtual_stages=virtual)
    model, what = llama(layers=layers), job(2048, batch)
    quick, full = (timed(model, cluster(pp), what, p, quick=q) for q in (True, False))
    assert quick.step_s[0] <= full.step_s[0] * (1 + 1e-9)
    assert quick.step_s[0] > 0.6 * full.step_s[0]
    assert sum(float(c[0]) for c in full.breakdown.values()) == pytest.approx(full.step_s[0], rel=1e-9)


def test_long_steps_are_extended_by_their_steady_state() -> None:
    """A replay of 4,096 micro-batches is not run whole, and costs what one of 256 says about each further micro-batch."""
    model = llama(layers=14)
    times = [
        timed(model, cluster(4), job(2048, b), plan(b, structure=MEGATRON, pp=4, dp_shard=8)).step_s[0]
        for b in (8 * 256, 8 * 512, 8 * 16384)
    ]
    slope = (times[1] - times[0]) / 256
    assert times[2] == pytest.approx(times[1] + slope * (16384 - 512), rel=1e-3)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    framework=st.sampled_from(["megatron", "deepspeed", "fsdp2"]),
    attention=st.sampled_from(["flash", "eager"]),
    precision=st.sampled_from(["bf16", "fp8"]),
)
@settings(max_examples=60, deadline=None)
def test_any_plan_is_priced(tp: int, pp: int, cp: int, micro: int, recompute: str, framework: str, attention: str, precision: str) -> None:
    structure = Structure(
        framework=framework,
        sharding="zero3" if framework == "fsdp2" else "zero1",
        sequence_parallel=tp > 1,
        recompute=recompute,
        attention=attention,
    )
    p = plan(128, micro=micro, structure=structure, tp=tp, pp=pp, cp=cp, dp_shard=64 // (tp * pp * cp))
    quick, full = (timed(llama(layers=16), cluster(8), job(4096, 128, precision=precision), p, quick=q) for q in (True, False))
    assert 0 < quick.step_s[0] <= full.step_s[0] * (1 + 1e-9)
    assert all(np.isfinite(c).all() and (c >= -1e-12).all() for c in full.breakdown.values())
    assert sum(t.seconds for t in full.terms(0)) == pytest.approx(full.step_s[0], rel=1e-9)
