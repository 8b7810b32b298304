"""Published, measured training steps: a sample of every kind of GPU, framework and layout, each with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.cost.step import TimeTable, exact, screen
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.resolve import resolve
from trainwright.spec.run import validate

RUNS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "published_steps.jsonl").read_text("utf-8").splitlines()]


def predict(run: dict[str, Any], way: Any = exact) -> TimeTable:
    r = resolve(validate(run["spec"]))
    table = PlanTable.from_plans([r.plan])
    return way(r.model, r.cluster, r.job, table, traffic(r.model, r.cluster, r.job, table))


@pytest.mark.parametrize("run", RUNS, ids=[f"{r['source'].split(':')[0]} {i}" for i, r in enumerate(RUNS)])
def test_a_published_step_within_a_quarter(run: dict[str, Any]) -> None:
    assert run["source"]
    assert predict(run).step_s[0] == pytest.approx(run["step_s"], rel=0.25)


def test_the_sample_as_a_whole() -> None:
    """Median error under 5 %, mean under 7 %, no bias; the 80 % interval holds about that share; the screen stays below."""
    made = [predict(r) for r in RUNS]
    measured = np.array([r["step_s"] for r in RUNS])
    error = np.array([t.step_s[0] for t in made]) / measured - 1
    assert np.median(np.abs(error)) < 0.05
    assert np.abs(error).mean() < 0.07
    assert abs(np.median(error)) < 0.03
    inside = np.mean([t.low_s[0] <= m <= t.high_s[0] for t, m in zip(made, measured)])
    assert 0.70 <= inside <= 1.0
    assert all(predict(r, screen).step_s[0] <= t.step_s[0] * (1 + 1e-9) for r, t in zip(RUNS, made))
