"""`trainwright train --dry-run`: one rank of a run of any size, built and stepped on fake tensors in this process, holds what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from layouts import MODELS, run_of

import trainwright as tw
from trainwright.cli import main
from trainwright.errors import SpecError
from trainwright.report.dry_run import predicted
from trainwright.resolve import resolve
from trainwright.spec.run import validate
from trainwright.train.dry import DryRun, dry_run

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"framework": "ddp", "dp": 8},
    "zero3": {"dp": 8, "sharding": "zero3"},
    "zero3 x sp": {"dp": 4, "tp": 2, "sharding": "zero3", "sequence_parallel": True},
    "1f1b": {"pp": 2, "dp": 4, "sharding": "zero3", "schedule": "1f1b"},
    "interleaved x sp": {
        "pp": 2,
        "tp": 2,
        "dp": 2,
        "sharding": "zero3",
        "sequence_parallel": True,
        "schedule": "interleaved-1f1b",
        "virtual_stages": 2,
    },
    "gpipe": {"pp": 4, "dp": 2, "sharding": "zero2", "schedule": "gpipe"},
}


def spec(strategy: dict[str, Any], nodes: int = 1, batch: int = 16, **model: Any) -> dict[str, Any]:
    return {
        "model": MODELS["llama"] | WIDE | model,
        "cluster": {"gpu": "H100", "nodes": nodes, "gpus_per_node": 8},
        "training": {"seq_len": 64, "global_batch_size": batch},
        "strategy": {"framework": "fsdp2", "micro_batch_size": 1, **strategy},
    }


def built_and_planned(said: dict[str, Any]) -> tuple[DryRun, dict[str, int]]:
    run = resolve(validate(said))
    planned = tw.estimate(run.filled)
    fullest = int(planned.table.memory.pipeline_rank[planned.index])
    return dry_run(run, fullest * run.plan.gpus // run.plan.pp), predicted(planned)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in ("ddp", "zero3", "interleaved x sp") else []) for n in LAYOUTS]
)
def test_one_rank_holds_what_the_plan_says(name: str) -> None:
    """What it owns to the byte, but for rotary frequencies, which the trainer computes; its peak within five percent."""
    built, planned = built_and_planned(spec(LAYOUTS[name]))
    buffers = resolve(validate(spec(LAYOUTS[name]))).model.buffer_bytes
    assert built.parameters == planned["parameters"] - buffers
    assert built.optimizer == planned["optimizer"]
    assert built.peak_bytes == pytest.approx(planned["peak_bytes"], rel=0.05)


@pytest.mark.parametrize("schedule", ["dualpipe-v", pytest.param("interleaved-1f1b", marks=pytest.mark.slow)])
def test_a_rank_with_several_chunks_holds_the_logits_of_one_micro_batch(schedule: str) -> None:
    """Its chunk with the head has no more in flight. Counted for all of the rank's, the peak would be half as much again."""
    layout = {"framework": "ddp", "pp": 2, "dp": 2, "schedule": schedule, "virtual_stages": 2, "recompute": "none"}
    said = spec(layout, batch=8, vocab_size=8192, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    said["cluster"]["gpus_per_node"] = 4
    said["training"] |= {"seq_len": 512, "master_weights": "none"}
    said["model"]["max_position_embeddings"] = 512
    built, planned = built_and_planned(said)
    assert built.peak_bytes <= planned["peak_bytes"] < 1.2 * built.peak_bytes


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved-1f1b", marks=pytest.mark.slow)])
def test_a_stage_in_ddp_holds_gradients_beside_its_buckets(schedule: str) -> None:
    """PyTorch's reducer around every stage: summed without one, once a step, gradients would exist once and the peak be a fifth lower."""
    wide = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048}
    said = spec({"framework": "ddp", "pp": 2, "dp": 4, "schedule": schedule, "recompute": "none"}, batch=32, **wide)
    said["training"] |= {"master_weights": "none"}
    built, planned = built_and_planned(said)
    assert built.peak_bytes == pytest.approx(planned["peak_bytes"], rel=0.01)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_masters_are_stepped_on_a_few_at_a_time(sharding: str) -> None:
    """Gradients in fp32 of all 16-bit weights at once would be 8 % above the plan's peak; one micro-batch, whose graph DDP takes for static."""
    deep = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1024}
    built, planned = built_and_planned(spec({"framework": "ddp", "sharding": sharding, "dp": 8}, batch=8, **deep))
    assert built.peak_bytes == pytest.approx(planned["peak_bytes"], rel=0.005)


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
READING_DATA: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "split loss": ("llama", {"tp": 2, "dp": 4}, {"loss": "vocab-parallel"}),
    "split loss in a pipeline": ("tied", {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}, {"loss": "vocab-parallel"}),
    "two copies": ("llama", {"pp": 2, "dp": 4, "schedule": "dualpipe", "virtual_stages": 2}, {}),
    "tied pipeline": ("tied", {"pp": 2, "dp": 4, "sharding": "zero3"}, {}),
    "experts": ("moe", {"dp": 8, "sharding": "zero3"}, {}),
    "experts over ranks": ("moe", {"dp": 8, "ep": 4, "sharding": "zero3"}, {}),
    "experts with room over ranks": ("moe", {"dp": 8, "ep": 2, "sharding": "zero3"}, {"moe_capacity_factor": 1.0}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=[pytest.mark.slow]
            if n in ("split loss", "experts", "experts over ranks", "experts with room over ranks", "two copies")
            else [],
        )
        for n in READING_DATA
    ],
)
def test_what_a_real_run_reads_off_its_tensors_is_known_without(name: str) -> None:
    """A scaled split loss, groups of ranks that hold one weight, numbers of tokens of each expert: none of it may need data."""
    model, strategy, training = READING_DATA[name]
    said = spec(
        strategy,
        batch=strategy["dp"] * strategy.get("pp", 1),
        **MODELS[model] | SMALL | ({"num_local_experts": 8} if model == "moe" else {}),
    )
    built, planned = built_and_planned(said | {"training": said["training"] | training})
    assert built.optimizer == pytest.approx(planned["optimizer"], rel=1e-3)  # step counters


def test_context_parallelism_holds_parts_of_the_sequence() -> None:
    said = spec({"dp": 2, "cp": 4, "sharding": "zero3"}, batch=2, **SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 1024})
    built, planned = built_and_planned(said | {"training": said["training"] | {"seq_len": 1024}})
    assert built.peak_bytes < 1.5 * planned["peak_bytes"]  # whole sequences: 4 times


def test_muon_keeps_the_states_that_the_plan_counts() -> None:
    """One momentum a matrix, experts' too; AdamW's two for table, head and vectors."""
    run = run_of("moe", {"dp": 4, "sharding": "zero3"}, {"optimizer": "muon"})
    planned = tw.estimate(run.filled).memory_dict()["states"]["optimizer"]
    counters = 4 * (2 * run.model.num_layers + 3)  # AdamW's, of two norms a layer, the last one, table and head
    assert dry_run(run).optimizer == planned + counters


@pytest.mark.parametrize("rank", [0, 15])
def test_fewer_experts_than_shards_are_on_all_ranks_alike(rank: int) -> None:
    """Cut between its experts a stack would be whole on two ranks, eight times their share; what is left is the router, a row of which is on each of two."""
    said = spec({"dp": 16, "sharding": "zero3"}, nodes=2, **MODELS["few experts"] | SMALL)
    run = resolve(validate(said))
    built, planned = dry_run(run, rank), predicted(tw.estimate(run.filled))
    assert built.parameters == pytest.approx(planned["parameters"], rel=0.03)
    assert built.optimizer == pytest.approx(planned["optimizer"], rel=0.03)


@pytest.mark.parametrize("dp", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_a_step_of_experts_cut_within_is_replayed(dp: int) -> None:
    """Four experts on eight ranks: weights are joined from pieces, gradients laid out rank after rank. No dimension divides by twelve: cut between."""
    said = spec(
        {"dp": dp, "sharding": "zero2", "recompute": "none"}, **MODELS["moe"] | WIDE | {"num_hidden_layers": 2, "num_local_experts": 4}
    )
    said["cluster"]["gpus_per_node"] = dp
    said["training"] |= {"seq_len": 128, "global_batch_size": dp, "moe_capacity_factor": 1.0}
    said["model"]["max_position_embeddings"] = 128
    built, planned = built_and_planned(said)
    assert built.peak_bytes == pytest.approx(planned["peak_bytes"], rel=1e-3)


def test_zero1_deals_what_tensor_parallelism_left() -> None:
    built, planned = built_and_planned(
        spec({"framework": "ddp", "sharding": "zero1", "dp": 4, "tp": 2, "sequence_parallel": True}, batch=4, **SMALL)
    )
    assert built.optimizer == planned["optimizer"] > 0


@pytest.mark.slow
def test_one_rank_of_16384() -> None:
    """Tensor x pipeline x data parallelism at its true size: no rank but one is ever made."""
    layout = {"tp": 8, "pp": 16, "dp": 128, "sharding": "zero3", "sequence_parallel": True, "recompute": "full"}
    built, planned = built_and_planned(spec(layout, nodes=2048, batch=16 * 128, num_hidden_layers=16))
    assert built.ranks == 16_384
    assert built.optimizer == planned["optimizer"]


def test_the_command_builds_the_fullest_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(spec(LAYOUTS["1f1b"])))
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(plan), "--dry-run", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["built"]["optimizer"] == found["predicted"]["optimizer"]
    assert found["built"]["rank"] in (0, 4)


def test_what_this_trainer_cannot_build_is_one_line() -> None:
    with pytest.raises(SpecError, match=r"training\.precision"):
        dry_run(
            resolve(
                validate(spec({"dp": 8, "sharding": "zero3"}) | {"training": {"seq_len": 64, "global_batch_size": 16, "precision": "fp8"}})
            )
        )


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ({"framework": "fsdp1", "sharding": "none"}, "strategy.framework: fsdp1 .*nearest: strategy.framework = ddp"),
        ({"framework": "fsdp1", "sharding": "zero3"}, "strategy.framework: fsdp1 .*nearest: strategy.framework = fsdp2"),
        ({"framework": "deepspeed", "sharding": "zero1"}, "strategy.framework: .*DeepSpeed.*nearest: fsdp2, ddp"),
        ({"async_tp": True, "tp": 2}, "strategy.async_tp"),
    ],
)
def test_what_would_be_built_otherwise_than_planned_is_refused(strategy: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        dry_run(
            resolve(validate(spec({"dp": 8 // strategy.get("tp", 1), **strategy}) | {"training": {"seq_len": 64, "global_batch_size": 16}}))
        )
