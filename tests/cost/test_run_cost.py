"""Failures, checkpoints, energy, money: published figures, limits, and what must not be possible."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.catalog.facts import failures_per_1000_node_days, rows
from trainwright.cost import energy, goodput, money
from trainwright.cost.run_cost import run_cost
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan, Structure

MEGATRON = Structure(framework="megatron")
H100 = GpuSpec(
    "H100-SXM-80GB",
    (),
    "NVIDIA",
    "SXM5",
    "9.0",
    132,
    {"bf16": 989e12},
    80,
    85520809984,
    "HBM3",
    3.35e12,
    "NVLink4",
    450e9,
    8,
    8,
    400,
    63e9,
    700,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
JOB = TrainingJob(8192, 512, tokens=15e12)


def cluster(gpus: int, price: float | None = 3.0) -> ClusterSpec:
    return ClusterSpec(H100, max(1, gpus // 8), min(gpus, 8), 8, 50e9, usd_per_gpu_hour=price, price_source="test")


def plan(gpus: int) -> ParallelPlan:
    return ParallelPlan(Structure(), dp_shard=gpus)


def test_every_fact_has_a_source() -> None:
    for name in ("failures", "power"):
        assert rows(name)
        assert all(r["source"] and r["confidence"] for r in rows(name))


def test_default_failure_rate_lies_between_the_best_and_the_worst_cluster() -> None:
    rates = [float(r["per_1000_node_days"]) for r in rows("failures") if r["basis"] == "yes"]
    assert min(rates) < failures_per_1000_node_days() < max(rates)


def test_llama_3_is_interrupted_every_3_hours() -> None:
    """arXiv:2407.21783: 419 unexpected interruptions in 54 days on 16,384 GPUs, one in 3.09 h."""
    assert goodput.mean_time_to_interruption(16384, 3.79) / 3600 == pytest.approx(3.09, rel=0.005)
    hours = 54 * 24 / 419
    assert hours == pytest.approx(3.09, rel=0.005)


def test_rsc_1_projection() -> None:
    """arXiv:2410.21680: 6.5 failures per 1,000 node-days means 1.8 h on 16,384 GPUs and 0.23 h on 131,072."""
    assert goodput.mean_time_to_interruption(16384, 6.5) / 3600 == pytest.approx(1.8, rel=0.02)
    assert goodput.mean_time_to_interruption(131072, 6.5) / 3600 == pytest.approx(0.23, abs=0.005)


def test_interruptions_that_do_not_grow_with_size_explain_rsc_jobs_of_1024_gpus() -> None:
    nodes_alone = goodput.mean_time_to_interruption(1024, 6.5) / 3600
    assert nodes_alone == pytest.approx(28.8, rel=0.01)
    assert goodput.mean_time_to_interruption(1024, 6.5, per_job_hour=1 / 10.9) / 3600 == pytest.approx(7.9, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "blocking", "restart", "minutes", "share"),
    [
        (1024, 300, 600, 169, 0.940),
        (1024, 60, 600, 76, 0.971),
        (1024, 10, 300, 31, 0.988),
        (16384, 300, 600, 40, 0.744),
        (16384, 60, 600, 19, 0.853),
        (16384, 10, 300, 8, 0.933),
    ],
)
def test_daly_intervals_at_the_rate_of_llama_3(gpus: int, blocking: float, restart: float, minutes: float, share: float) -> None:
    mtti = goodput.mean_time_to_interruption(gpus, 3.79)
    interval = goodput.daly(blocking, mtti)
    assert interval / 60 == pytest.approx(minutes, abs=0.5)
    assert goodput.goodput(interval, blocking, restart, mtti) == pytest.approx(share, abs=6e-4)


@given(st.floats(0.1, 3000), st.floats(3600, 1e7))
def test_daly_is_the_best_interval_and_young_is_close(blocking: float, mtti: float) -> None:
    best = goodput.goodput(goodput.daly(blocking, mtti), blocking, 0, mtti)
    for factor in (0.3, 0.5, 2, 3):
        assert goodput.goodput(goodput.daly(blocking, mtti) * factor, blocking, 0, mtti) <= best + 1e-9
    if blocking < mtti / 100:
        assert goodput.young(blocking, mtti) == pytest.approx(goodput.daly(blocking, mtti), rel=0.08)


@given(st.floats(1, 1e6), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(1, 1e8))
def test_goodput_is_a_share(interval: float, blocking: float, restart: float, mtti: float) -> None:
    assert 0 <= goodput.goodput(interval, blocking, restart, mtti) <= 1


@given(st.floats(10, 1e4), st.floats(1, 100), st.floats(1e6, 1e9))
def test_goodput_first_order(interval: float, blocking: float, mtti: float) -> None:
    """For rare failures: 1 - d / (tau + d) - ((tau + d) / 2 + R) / M, to second order."""
    cycle = interval + blocking
    exact = goodput.goodput(interval, blocking, 60, mtti)
    first = interval / cycle * (1 - cycle / 2 / mtti) * exp(-60 / mtti)
    assert exact == pytest.approx(first, abs=(cycle / mtti) ** 2 + 1e-12)


def test_no_failures_need_no_checkpoints() -> None:
    assert goodput.mean_time_to_interruption(8, 0) == inf
    assert goodput.daly(10, inf) == inf
    assert goodput.goodput(inf, 10, 60, inf) == 1.0


@pytest.mark.parametrize(
    ("framework", "masters", "autocast", "each"),
    [
        *((name, "fp32", False, 14) for name in ("megatron", "deepspeed")),
        *((name, "fp32", False, 12) for name in ("fsdp2", "fsdp1", "ddp")),
        *((name, "none", False, 6) for name in ("megatron", "fsdp2", "ddp")),
        ("ddp", "none", True, 12),
    ],
)
def test_a_checkpoint_of_adamw_in_bf16(framework: str, masters: str, autocast: bool, each: int) -> None:
    """Megatron-Core and DeepSpeed save what they hold, 16-bit weights too; PyTorch's trainers one fp32 copy. BLOOM: 2.3 TB for 176B with optimizer states
    (bigscience chronicles) is 13 bytes a parameter."""
    model, work = build_model(LLAMA, "llama"), replace(JOB, master_weights=masters, autocast=autocast)
    assert goodput.checkpoint_bytes(model, work, Structure(framework=framework)) == each * model.parameters


@pytest.mark.parametrize(("optimizer", "of_matrices", "of_others"), [("muon", 8, 12), ("sgd", 4, 4), ("lion", 8, 8), ("adafactor", 4, 4)])
def test_a_checkpoint_of_other_optimizers(optimizer: str, of_matrices: int, of_others: int) -> None:
    """Bytes a parameter in fp32 masters: Muon keeps one momentum of the layers' matrices and AdamW's two of what is left; Adafactor a row and a column."""
    model, work = build_model(LLAMA, "llama"), replace(JOB, optimizer=optimizer)
    matrices = sum(n * w.elements for block, n in model.counts for op in block.ops for w in op.weights if len(w.shape) > 1)
    told = goodput.checkpoint_bytes(model, work, Structure(framework="fsdp2"))
    assert told == pytest.approx(
        of_matrices * matrices + of_others * (model.parameters - matrices), rel=0.001 if optimizer == "adafactor" else 0
    )


def test_a_checkpoint_of_adapters() -> None:
    model, lora = build_model(LLAMA, "llama"), replace(JOB, method="lora", lora_targets=("q_proj", "v_proj"), lora_rank=16)
    assert goodput.checkpoint_bytes(model, lora, MEGATRON) == 14 * 80 * 16 * ((8192 + 8192) + (8192 + 1024))


def test_llama_3_405b_stays_above_90_percent() -> None:
    """The paper's effective training time, with its storage (2 TB/s) and its rate of failures."""
    model = build_model(
        LLAMA | {"hidden_size": 16384, "num_attention_heads": 128, "intermediate_size": 53248, "num_hidden_layers": 126}, "405b"
    )
    found = goodput.reliability(model, JOB, MEGATRON, 16384, per_1000_node_days=3.79)
    assert found.checkpoint_blocking_s == pytest.approx(2.84, rel=0.01)
    assert 0.90 < found.goodput < 0.97


def test_predicted_draw_of_v100_and_measured() -> None:
    """arXiv:2104.10350: 330 W a GPU for GPT-3, the whole system measured."""
    v100 = replace(H100, id="V100-SXM2-32GB", tdp_w=300)
    assert energy.watts(v100) == pytest.approx(330, rel=0.05)


def test_energy_is_hours_times_watts_times_pue() -> None:
    assert energy.energy_mwh(H100, 1e6, pue=1.0) == pytest.approx(1275 * 0.725)
    assert energy.energy_mwh(H100, 1e6) == pytest.approx(1.1 * energy.energy_mwh(H100, 1e6, pue=1.0))


def test_unknown_board_takes_the_median_node() -> None:
    other = replace(H100, id="X-1", tdp_w=500)
    assert 1.3 * 500 < energy.rated_watts(other) < 2.1 * 500


def test_money_follows_from_hours() -> None:
    found = run_cost(build_model(LLAMA, "llama"), cluster(64), JOB, plan(64), 30.0)
    steps = 15e12 / (8192 * 512)
    assert found.steps_days == pytest.approx(steps * 30 / 86400)
    assert found.days == pytest.approx(found.steps_days / found.goodput)
    assert found.gpu_hours == pytest.approx(found.days * 24 * 64)
    assert found.usd == pytest.approx(3.0 * found.gpu_hours)
    assert set(found.to_dict()) >= {"days", "gpu_hours", "cost_usd", "energy_mwh", "checkpoint_interval_s", "goodput"}


def test_what_was_not_said_is_null() -> None:
    found = run_cost(build_model(LLAMA, "llama"), cluster(64, price=None), replace(JOB, tokens=None), plan(64), 30.0)
    assert found.days is found.gpu_hours is found.usd is found.energy_mwh is None
    assert 0 < found.goodput < 1
    priced = run_cost(build_model(LLAMA, "llama"), cluster(64, price=None), JOB, plan(64), 30.0)
    assert priced.usd is None
    assert priced.days is not None


def test_columns_and_numbers_agree() -> None:
    step_s = np.array([1.0, 2.5])
    columns = money.days(JOB, step_s, 0.9)
    assert columns is not None
    assert columns.tolist() == [money.days(JOB, 1.0, 0.9), money.days(JOB, 2.5, 0.9)]
    assert money.days(JOB, 1.0, 0.0) == inf
