"""PyTorch itself against the estimate: every strategy that runs on fake tensors, a tiny model, to 8 KiB and to the call. Needs the extra ``train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.cli import main

pytest.importorskip("torch", reason="torch is not installed: pip install 'trainwright[train]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'trainwright[train]'")

GPT = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 128,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 512,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 4}

AMP = {"autocast": True}
LOW = {"master_weights": "none", "gradient_dtype": "bf16"}
# name: (model, training, strategy)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DDP with autocast": (GPT, AMP, {"framework": "ddp"}),
    "DDP in bf16, accumulating": (QWEN2, {**LOW, "global_batch_size": 12}, {"framework": "ddp"}),
    "DDP with LoRA": (LLAMA, {**LOW, "method": "lora"}, {"framework": "ddp"}),
    "ZeRO-1": (LLAMA, {"precision": "fp32"}, {"framework": "ddp", "sharding": "zero1"}),
    "FSDP2 zero2": (QWEN3, {}, {"sharding": "zero2"}),
    "FSDP2 zero3": (LLAMA, {}, {"sharding": "zero3"}),
    "FSDP2 zero3, uneven, full recompute": (GPT, {"global_batch_size": 6}, {"sharding": "zero3", "dp": 3, "recompute": "full"}),
    "FSDP2 zero3, accumulating": (QWEN2, {"global_batch_size": 20}, {"sharding": "zero3"}),
    "FSDP2 zero3, reduced every micro-batch": (QWEN2, {"global_batch_size": 20}, {"sharding": "zero3", "options": {"no_sync": False}}),
    "FSDP2 zero3, selective recompute, eager": (QWEN3, {}, {"sharding": "zero3", "recompute": "selective", "attention": "eager"}),
    "Gemma": (LLAMA | {"model_type": "gemma", "tie_word_embeddings": True}, {}, {}),
    "OLMo 2": (LLAMA | {"model_type": "olmo2"}, {}, {}),
    "StarCoder 2": (LLAMA | {"model_type": "starcoder2"}, {}, {}),
    "HSDP": (LLAMA, {}, {"sharding": "zero3", "dp_replicate": 2, "dp_shard": 2}),
    "replicate()": (GPT, {}, {"sharding": "none"}),
    "TP": (
        LLAMA,
        {**LOW, "global_batch_size": 1, "optimizer_kernel": "for-loop"},
        {"sharding": "none", "tp": 2, "dp": 1, "sequence_parallel": False},
    ),
    "SP": (
        LLAMA | {"num_key_value_heads": 4},
        {**LOW, "global_batch_size": 2},
        {"sharding": "none", "tp": 4, "dp": 1, "sequence_parallel": True},
    ),
    "SP with a split loss": (
        LLAMA,
        {**LOW, "loss": "vocab-parallel", "global_batch_size": 1},
        {"sharding": "none", "tp": 2, "dp": 1, "sequence_parallel": True},
    ),
    "FSDP2 with SP": (LLAMA, {}, {"sharding": "zero3", "tp": 2, "dp": 2, "sequence_parallel": True}),
    "pipeline 1F1B": (LLAMA, {**LOW, "global_batch_size": 4}, {"sharding": "none", "pp": 3, "dp": 1, "schedule": "1f1b"}),
    "pipeline with nobody to share data with": (
        LLAMA,
        {**LOW, "global_batch_size": 2},
        {"framework": "ddp", "pp": 2, "dp": 1, "schedule": "1f1b"},
    ),
    "pipeline 1F1B in DDP with autocast": (LLAMA, AMP, {"framework": "ddp", "pp": 2, "dp": 2, "schedule": "1f1b"}),
    "pipeline 1F1B in DDP with autocast, full recompute": (
        GPT,
        AMP,
        {"framework": "ddp", "pp": 2, "dp": 2, "schedule": "1f1b", "recompute": "full"},
    ),
    "pipeline GPipe with zero2": (GPT, LOW, {"sharding": "zero2", "pp": 2, "dp": 2, "schedule": "gpipe"}),
}


def spec(name: str) -> dict[str, Any]:
    model, training, strategy = RUNS[name]
    gpus = 1
    if "dp" in strategy:
        for axis in ("dp", "tp", "pp"):
            gpus *= strategy.get(axis, 1)
    return {
        "model": model,
        "cluster": {"gpu": "H100-SXM-80GB", "nodes": 1, "gpus_per_node": gpus if "dp" in strategy else 4},
        "training": {"seq_len": 64, "global_batch_size": 8, **training},
        "strategy": {"framework": "fsdp2", **strategy},
    }


@pytest.mark.parametrize("name", RUNS)
def test_estimate_and_pytorch_agree(name: str) -> None:
    found = tw.verify(spec(name))
    off = {r.what: (r.predicted, r.measured, r.difference) for r in found.rows if not found.within(r)}
    assert not off, f"predicted, measured, difference: {off}"
    assert found.exact


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_several_chunks_a_rank(schedule: str) -> None:
    """PyTorch's own schedule over the chunks that nobody had to name; a V holds the table and the head of a tied model twice, on its first rank."""
    document = spec("pipeline GPipe with zero2")
    document["strategy"]["schedule"] = schedule
    found = tw.verify(document)
    assert found.estimate.plan.virtual_stages == 2
    assert {r.what for r in found.rows if not found.within(r)} <= {"peak"}
    peak = next(r for r in found.rows if r.what == "peak")
    assert abs(peak.difference) < 0.06 * peak.measured  # what a split backward keeps of gradients for W is not counted


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_micro_batches_between_the_first_and_the_last_are_alike() -> None:
    """One of them runs for all; all of them measured say the same."""
    from trainwright.resolve import resolve
    from trainwright.spec.run import validate
    from trainwright.train.probe import measure
    from trainwright.train.scope import measurable

    for options in ({}, {"no_sync": False}):
        document = spec("FSDP2 zero3, accumulating")
        document["model"] = LLAMA | {"num_hidden_layers": 1}
        document["strategy"]["options"] = options
        table = measurable(resolve(validate(document)))
        assert measure(table)[0] == measure(table, shorten=True)[0]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_measured_rows_of_the_data_come_out_again() -> None:
    from trainwright.train.probe import measure

    lines = (Path(__file__).parents[1] / "data" / "truth_memory_more.jsonl").read_text().splitlines()
    rows = {r["id"]: r for r in map(json.loads, lines)}
    for name in ("ddp-gpt-dp4-b2-bf16", "ddp-lora-llama-dp4-qv"):
        found, wanted = measure(rows[name]["spec"])[0], rows[name]["measured"]
        assert {k: found[k] for k in wanted} == wanted


def test_nothing_of_pytorch_stays_changed() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    before = (torch.UntypedStorage.resize_, DeviceMesh._flatten, torch.get_default_dtype())
    tw.verify(spec("SP"))
    assert (torch.UntypedStorage.resize_, DeviceMesh._flatten, torch.get_default_dtype()) == before
    assert not dist.is_initialized()


def test_the_command_prints_a_table_or_json_and_its_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(spec("FSDP2 zero3")))

    def run(*more: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["verify", str(file), "--memory", *more])
        out, err = capsys.readouterr()
        assert err == ""
        return stopped.value.code, out

    status, text = run()
    assert status == 0
    assert "All 12 rows agree to 8,192 bytes" in text
    assert "rank 0 of 4" in text
    status, text = run("--json", "--tolerance", "0")
    document = json.loads(text)
    assert (status == 0) == document["exact"] == all(r["within"] for r in document["rows"])
    assert document["measurement"]["software"].startswith("torch ")
    assert {r["what"] for r in document["rows"]} >= {"parameters", "peak", "dp all_gather", "dp all_gather, calls"}
