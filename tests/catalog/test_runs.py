"""Published runs: 6ND over their hours is the utilisation that the table states, and their sizes are those of the catalogue."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.catalog.load import list_runs, load_gpu, load_model
from trainwright.catalog.runs import implied_mfu
from trainwright.errors import SpecError

RUNS = list_runs()


def known(gpu: str) -> bool:
    try:
        load_gpu(gpu)
    except SpecError:
        return False
    return True


COUNTED = [r for r in RUNS if r["implied_mfu_6nd"] and known(r["gpu"])]


def test_every_run_has_a_source() -> None:
    assert all(r["source"] and r["confidence"] and r["tokens"] for r in RUNS)


def test_most_runs_can_be_counted() -> None:
    assert len(COUNTED) >= 35
    assert {r["gpu"] for r in RUNS if r["implied_mfu_6nd"] and not known(r["gpu"])} == {"TPUv3"}


@pytest.mark.parametrize("run", COUNTED, ids=lambda r: str(r["model"]))
def test_six_nd_over_the_hours_is_the_stated_utilisation(run: dict[str, Any]) -> None:
    found = implied_mfu(run["active_params"], run["tokens"], run["gpu_hours"], load_gpu(run["gpu"]).peak("bf16"))
    assert found == pytest.approx(run["implied_mfu_6nd"], abs=0.001)


@pytest.mark.parametrize("run", [r for r in RUNS if r["model_id"]], ids=lambda r: str(r["model"]))
def test_a_run_has_the_size_of_its_model(run: dict[str, Any]) -> None:
    model = load_model(run["model_id"])
    assert model.parameters == run["params"]
    assert run["active_params"] == pytest.approx(model.active_parameters, rel=0.06)  # papers round what is active


@pytest.mark.parametrize("run", COUNTED, ids=lambda r: str(r["model"]))
def test_no_run_beats_the_hardware(run: dict[str, Any]) -> None:
    assert 0.02 < run["implied_mfu_6nd"] < 0.6
