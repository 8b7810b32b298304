"""Kernels against measurements: products by shape, attention, casts, and the shape of the laws."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.catalog.load import list_gpus, load_gpu
from trainwright.cost.kernels import Rates, attention_seconds, constants, matmul_seconds, misalignment, rates

from .parts import A100, H100

DATA = Path(__file__).parents[1] / "data" / "matmul.csv"
LAW = constants()["matmul"]


def measured(gpu: str, *kinds: str) -> list[dict[str, str]]:
    with DATA.open(encoding="utf-8") as file:
        return [r for r in csv.DictReader(file) if r["gpu"] == gpu and r["op"] in kinds]


def burst(rate: Rates, peak: float) -> Rates:
    """A short benchmark runs at boost clocks, a training step at what the power limit leaves."""
    return replace(rate, product_flops=peak * LAW["burst"], bytes_per_s=H100.hbm_bytes_per_s * LAW["stream_share"])


def seconds(m: float, n: float, k: float, count: float = 1, precision: str = "bf16", gpu: object = H100) -> float:
    rate = rates(gpu, precision, 2025.0)  # type: ignore[arg-type]
    return float(matmul_seconds(*(np.array([float(x)]) for x in (m, n, k, count)), rate, precision)[0])


def test_126_measured_products() -> None:
    """80 products and 46 batched ones of one H100 (XLA's table of cuBLAS times): mean error of the law under 4.5 %, the worst tenth under 10 %."""
    rows = [r for r in measured("H100-SXM-80GB", "gemm", "batched gemm") if r["dtype"] == "bf16"]
    assert len(rows) == 126
    m, n, k, b, tflops = (np.array([float(r[c] or 1) for r in rows]) for c in ("m", "n", "k", "b", "achieved_tflops"))
    predicted = matmul_seconds(m, n, k, b, burst(rates(H100, "bf16", 2025.0), 989.4e12), "bf16")
    error = np.abs(predicted / (2 * m * n * k * b / tflops / 1e12) - 1)
    assert error.mean() < 0.045
    assert np.quantile(error, 0.9) < 0.10


def test_sustained_rates_stay_below_the_best_short_product() -> None:
    """ml-engineering's best shapes (MAMF): 0.87 of the peak on A100, 0.80 on H100; nothing in a step runs faster."""
    for gpu, best in ((A100, 0.87), (H100, 0.81)):
        assert 0.5 < rates(gpu, "bf16", 2025.0).product_flops / gpu.peak("bf16") <= best


def test_a_wave_more_costs_more_for_small_products() -> None:
    """A product of few tiles pays relatively more for its last wave than one of many."""
    small = seconds(1024, 1024, 4096) / (1024 * 1024)
    large = seconds(8192, 8192, 4096) / (8192 * 8192)
    assert small > 1.1 * large


def test_a_short_k_fills_the_pipeline_badly() -> None:
    assert seconds(8192, 8192, 128) / 128 > 1.5 * seconds(8192, 8192, 8192) / 8192


def test_skinny_products_are_bound_by_bytes() -> None:
    """One row times a matrix reads the matrix: no faster than memory."""
    n = k = 16384
    assert seconds(1, n, k) >= 2 * n * k / H100.hbm_bytes_per_s


def test_a_grouped_product_beats_its_parts() -> None:
    """128 small products in one launch share the waves."""
    assert seconds(256, 2048, 2048, count=128) < 128 * seconds(256, 2048, 2048)


def test_misaligned_dimensions_are_slow() -> None:
    """d_ff 10922 against 10944 on H100: 273 against 398 TFLOP/s (46 % more time); 10944 is a multiple of 64."""
    odd, even = misalignment(np.array([10922.0]), LAW)[0], misalignment(np.array([10944.0]), LAW)[0]
    assert even == 1.0
    assert odd == pytest.approx(398.38 / 272.73, abs=0.35)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_more_work_is_never_faster_among_aligned_shapes(m: int, n: int, k: int) -> None:
    base = seconds(64 * m, 64 * n, 64 * k)
    assert seconds(64 * m + 64, 64 * n, 64 * k) >= base
    assert seconds(64 * m, 64 * n + 64, 64 * k) >= base
    assert seconds(64 * m, 64 * n, 64 * k + 64) >= base


@given(st.integers(2, 200))
def test_splitting_a_product_is_never_faster_in_sum(n: int) -> None:
    """Tensor parallelism keeps the FLOPs and loses in shape."""
    assert 2 * seconds(4096, 64 * n, 4096) >= seconds(4096, 128 * n, 4096)


def test_fp8_is_faster_than_bf16_but_not_twice() -> None:
    assert 1.2 < seconds(8192, 8192, 8192) / seconds(8192, 8192, 8192, precision="fp8") < 2.0


def test_a_power_limit_slows_the_card() -> None:
    """H100s limited to 500 W sustain about 0.8 of those with 700 W."""
    slow = rates(replace(H100, tdp_w=500.0), "bf16", 2025.0).product_flops / rates(H100, "bf16", 2025.0).product_flops
    assert 0.7 < slow < 0.95


def test_attention_rates_of_the_readme() -> None:
    """FlashAttention 2 forward + backward, causal, head 128: the README's TFLOP/s on A100 within a fifth from 2k to 16k."""
    rows = [r for r in measured("A100-SXM-80GB", "attention fwd+bwd") if r["software"] == "FlashAttention-2" and r["causal"] == "True"]
    rows = [r for r in rows if r["head_dim"] == "128" and int(r["seq"]) >= 2048]
    assert len(rows) >= 4
    rate = rates(A100, "bf16", 2024.5, "sdpa")
    for r in rows:
        assert 1e12 / attention_seconds(np.array([1.0]), float(r["seq"]), 128, rate)[0] / 1e24 == pytest.approx(
            float(r["achieved_tflops"]), rel=0.2
        )


def test_newer_attention_is_faster() -> None:
    one = np.array([1e12])
    flash1, flash2, cudnn = (
        attention_seconds(one, 8192.0, 128, rates(H100, "bf16", y, lib))[0] for y, lib in ((2023.5, "sdpa"), (2025, "sdpa"), (2025, "te"))
    )
    assert flash1 > flash2 > cudnn


def test_a_card_without_measurements_says_so() -> None:
    stranger = replace(H100, id="L40S-48GB", arch="8.9", peak_flops={"bf16": 362e12}, tdp_w=350)
    rate = rates(stranger, "bf16", 2025.0)
    assert "L40S-48GB" in rate.relative
    assert 0.4 < rate.product_flops / 362e12 < 0.9
    assert rates(H100, "bf16", 2025.0).relative == ""


def test_every_table_of_constants_has_a_source() -> None:
    def leaves(table: dict[str, object], path: str = "") -> None:
        numbers = [k for k, v in table.items() if isinstance(v, (int, float, list)) and k != "match"]
        if numbers:
            assert table.get("source"), f"{path}: {numbers}"
        for name, inner in table.items():
            if isinstance(inner, dict) and name not in ("expert_launches", "settled", "attention_of"):  # tables inside a sourced table
                leaves(inner, f"{path}.{name}")

    leaves(dict(constants()))


def test_every_card_of_the_catalogue_has_rates() -> None:
    """Positive, at most the peak; a card without published steps of its own says from which relative it is scaled."""
    for entry in list_gpus():
        gpu = load_gpu(entry["id"])
        rate = rates(gpu, "bf16", 2026.0)
        assert 0 < rate.product_flops <= max(gpu.peak("bf16"), gpu.peak("fp16")), gpu.id
        assert rate.bytes_per_s > 0, gpu.id
        assert bool(rate.relative) == (gpu.arch not in ("7.0", "8.0", "9.0", "10.0", "10.3")), gpu.id


def test_one_tile_beyond_a_full_wave_is_the_dearest() -> None:
    """132 tiles of 128 x 256 fill an H100 once (1536 x 2816); one row of tiles more starts a second wave that is nearly empty."""
    full, beyond = (seconds(m, 2816, 8192) / m for m in (1536, 1664))
    assert beyond > 1.05 * full
    many = [seconds(m, 2816, 8192) / m for m in (15360, 15488)]
    assert many[1] - many[0] < 0.5 * (beyond - full)
