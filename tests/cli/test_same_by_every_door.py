"""One run said through the command line, a dict, TOML, JSON, or its own filled spec read again: the same answer, to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.report.toml import plan_toml

RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "price": (
        ("gpt2", "--on", "16xH100", "--tokens", "1B", "--price", "1.5", "--host-memory-gb", "512", "--set", "cluster.nvme_tb=3"),
        {
            "model": "gpt2",
            "cluster": {"gpu": "H100", "nodes": 2, "gpus_per_node": 8, "usd_per_gpu_hour": 1.5, "host_memory_gb": 512, "nvme_tb": 3},
            "training": {"tokens": 1e9},
        },
    ),
    "megatron": (
        (
            "llama-3.2-1b",
            "--on",
            "8xA100-40GB",
            "--framework",
            "megatron",
            "--tp",
            "2",
            "--pp",
            "2",
            "--global-batch",
            "64",
            "--tokens",
            "3e9",
        ),
        {
            "model": "llama-3.2-1b",
            "cluster": "8xA100-40GB",
            "training": {"global_batch_size": 64, "tokens": 3e9},
            "strategy": {"framework": "megatron", "tp": 2, "pp": 2},
        },
    ),
    "lora": (
        ("pythia-70m", "--on", "2xRTX-4090", "--method", "lora", "--lora-rank", "8", "--set", "strategy.options.no_sync=false"),
        {
            "model": "pythia-70m",
            "cluster": "2xRTX-4090",
            "training": {"method": "lora", "lora_rank": 8},
            "strategy": {"options": {"no_sync": False}},
        },
    ),
}
ANSWERS = ("fits", "gpus", "parameters", "memory", "time", "communication", "throughput")
RUN = ("days", "gpu_hours", "cost_usd", "energy_mwh", "goodput", "checkpoint_bytes")


def answer(document: dict[str, Any]) -> dict[str, Any]:
    return {k: document[k] for k in ANSWERS} | {k: document["run"][k] for k in RUN}


@pytest.mark.parametrize("name", RUNS)
def test_every_door(run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    arguments, document = RUNS[name]
    first = tw.estimate(document)
    found = answer(first.to_dict())
    assert answer(json.loads(run("estimate", *arguments, "--json").out)) == found
    (tmp_path / "run.json").write_text(json.dumps(document))
    (tmp_path / "filled.json").write_text(json.dumps(first.to_dict()["spec"]))
    (tmp_path / "plan.toml").write_text(plan_toml(first))
    for file in ("run.json", "filled.json", "plan.toml"):
        assert answer(json.loads(run("estimate", str(tmp_path / file), "--json").out)) == found, file
    assert answer(tw.estimate_many([document, document])[1].to_dict()) == found


def test_a_node_without_the_memory_for_it_is_said(run: Callable[..., Any]) -> None:
    """`fits` is the card's; what a node's RAM and disk lack is a warning."""
    ran = run("estimate", "gpt2", "--on", "8xH100", "--offload", "optimizer-cpu", "--host-memory-gb", "1", "--json")
    assert any(w.startswith("cluster.host_memory_gb: host memory of") for w in json.loads(ran.out)["warnings"])
    assert "host_memory_gb" in run("memory", "gpt2", "--on", "8xH100", "--host-memory-gb", "1").out
