"""Adding a row or a family is enough: every GPU and one model of every family goes through the whole estimate."""

from __future__ import annotations

from typing import Any

import pytest

import trainwright as tw
from trainwright.catalog import tables
from trainwright.catalog.load import default_price, load_gpu

GPUS = [row["id"] for row in tables.rows("gpus.csv")]
SMALLEST: dict[str, str] = {}
for _name, _entry in sorted(tables.document("models.json").items(), key=lambda item: item[1]["parameters"]):
    SMALLEST.setdefault(_entry["family"], _name)


def run(model: str, cluster: str, **strategy: Any) -> dict[str, Any]:
    training = {"seq_len": 1024, "global_batch_size": 64, "tokens": 1e10}
    return tw.estimate({"model": model, "cluster": cluster, "training": training, "strategy": strategy}).to_dict()


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_estimates(gpu: str) -> None:
    found = run("llama-3.2-1b", f"16x{gpu}", framework="fsdp2")
    assert found["memory"]["capacity_bytes"] == load_gpu(gpu).capacity_bytes
    assert found["time"]["step_s"] > 0
    assert 0 < found["throughput"]["mfu"] < 1
    # What is not known is null, never 0.
    assert (found["run"]["energy_mwh"] is None) == (load_gpu(gpu).tdp_w == 0)
    assert (found["run"]["cost_usd"] is None) == (default_price(gpu)[0] is None)


@pytest.mark.parametrize("framework", ["megatron", "fsdp2", "deepspeed"])
@pytest.mark.parametrize("family", sorted(SMALLEST))
def test_every_family_estimates(family: str, framework: str) -> None:
    found = run(SMALLEST[family], "64xH100", framework=framework)
    assert found["parameters"]["total"] == tables.document("models.json")[SMALLEST[family]]["parameters"]
    assert found["memory"]["peak_bytes"] > 0
    assert 0 < found["throughput"]["mfu"] < 1
