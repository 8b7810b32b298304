"""What shows of hidden traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.distinct import distinct
from trainwright.cost.interval import kind_of
from trainwright.cost.kernels import rates
from trainwright.cost.overlap import behind
from trainwright.cost.pieces import together
from trainwright.cost.software import software_year
from trainwright.spec.plan import Structure

from .parts import H100, job, llama

seconds = st.floats(1e-6, 1e3)


@given(seconds, seconds, st.floats(0, 1))
def test_hidden_traffic_shows_its_residual_and_what_outlasts_the_work(traffic: float, window: float, residual: float) -> None:
    shown = float(behind(np.array([traffic]), np.array([window]), residual)[0])
    assert max(0.0, traffic - window) - 1e-9 <= shown <= traffic * (1 + 1e-12)
    assert shown == pytest.approx(max(traffic - window, 0) + residual * min(traffic, window), rel=1e-9, abs=1e-12)


@given(seconds, seconds)
def test_launches_join_kernels_smoothly(gpu: float, host: float) -> None:
    """Never below the longer one, at most 26 % above it (where both are equal)."""
    both = float(together(np.array([gpu]), host)[0])
    assert max(gpu, host) * (1 - 1e-9) <= both <= max(gpu, host) * 2 ** (1 / 3) * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2**22), st.integers(1, 3)), min_size=1, max_size=50))
def test_different_combinations(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array(c, dtype=np.int64) for c in zip(*rows)]
    first, where = distinct(columns)
    assert len(first) == len(set(rows))
    for column in columns:
        assert (column[first][where] == column).all()


def test_dates_of_software() -> None:
    assert software_year(Structure(framework_date="2025-06")) == pytest.approx(2025.458, abs=1e-3)
    assert software_year(Structure()) > 2026


def test_the_kind_of_a_case_is_the_first_that_holds() -> None:
    rate = rates(H100, "bf16", 2025.0)
    assert kind_of(llama(), job(), Structure(framework="fsdp2"), rate) == "fsdp"
    assert kind_of(llama(), job(precision="fp8"), Structure(framework="megatron"), rate) == "fp8"
    assert kind_of(llama(), job(precision="fp8"), Structure(framework="megatron", offload="optimizer-cpu"), rate) == "offload"
