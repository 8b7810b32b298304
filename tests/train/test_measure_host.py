"""What a CPU rank spends on sending, measured: the parts are what the plan multiplies, and a line goes through its points."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from alike import Ranks

from trainwright.train import measure_machine
from trainwright.train.measure_host import PASSES, apart, line


def test_a_line_through_two_points_is_never_below_zero() -> None:
    assert line((10.0, 110.0), (7.0, 57.0)) == pytest.approx([2.0, 0.5])
    assert line((10.0, 110.0), (7.0, 5.0)) == [7.0, 0.0]  # a large message that seems to cost less: noise
    assert line((10.0, 110.0), (-1.0, -2.0)) == [0.0, 0.0]


def test_passes_and_their_reduction_come_apart() -> None:
    assert apart(5.0, 2.0 * PASSES + 3.0) == pytest.approx((2.0, 3.0))
    assert apart(1.0, 2.0 * PASSES) == pytest.approx((2.0, 0.0))  # noise: nothing is below zero, and the sum of many passes stays


def test_seconds_are_divided_by_the_messages_there_are(ranks: Ranks) -> None:
    for answer in ranks(2)("host_ranks:sent"):
        assert {kind: counted for kind, (_, counted) in answer.items()} == {kind: assumed for kind, (assumed, _) in answer.items()}


def test_split_products_are_products(ranks: Ranks) -> None:
    assert max(ranks(2)("host_ranks:pairs")) < 1e-5


def test_every_way_to_send_is_measured(ranks: Ranks) -> None:
    found, other = ranks(2)("host_ranks:measured")
    assert found == other  # one answer for all ranks
    assert set(found["groups"]) == {"none", "zero2", "zero3"}
    assert set(found["cp"]) == {"send_recv", "all_gather", "reduce_scatter", "all_to_all"}
    assert set(found["tp"]) == {"product_s", "all_reduce", "all_gather", "reduce_scatter"}

    def numbers(value: Any) -> list[float]:
        return (
            [value] if isinstance(value, float) else [n for v in (value.values() if isinstance(value, dict) else value) for n in numbers(v)]
        )

    assert all(0 <= n < 1 and math.isfinite(n) for n in numbers(found))
    assert sum(sum(found["groups"][k]["each"]) for k in found["groups"]) > 0


def test_launches_and_messages_are_told_for_the_fastest_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes four times as long for its pulse as it did, and a clock on which everything takes a second."""
    monkeypatch.setattr(measure_machine, "FIRST_BEATS", 1)
    clock = measure_machine.Clock(torch.device("cpu"), 0.006, 4)
    clock.fastest = 1.0
    monkeypatch.setattr(clock, "_beat", lambda: 4.0)
    ticks = itertools.count(0.0)
    monkeypatch.setattr(clock, "now", lambda: next(ticks))
    monkeypatch.setattr(measure_machine.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(measure_machine.dist, "barrier", lambda group: None)
    assert measure_machine.launch(clock) == 0.25 / 16
    assert list(measure_machine._timed(lambda: None, None, clock, 3)) == [0.25] * 3
