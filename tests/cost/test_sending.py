"""What sending costs the rank itself where the host is the device: lines on the plan's own messages, and nothing where nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

import trainwright as tw

MODEL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 1024}
HIDDEN = 256
# Numbers that a sum tells apart.
GROUP = {"each": [1.0, 0.0], "reduce": [100.0, 0.0]}
HOST = {
    "serial": 1.0,
    "groups": {"none": GROUP, "zero3": GROUP},
    "tp": {"product_s": 1.0, "all_gather": [100.0, 0.0], "reduce_scatter": [100.0, 0.0], "all_reduce": [10_000.0, 0.0]},
    "cp": {"send_recv": [0.0, 1.0]},
}


def step(folder: Path, host: dict, **strategy: object) -> float:
    gpu = {"id": "box", "cc_or_arch": "cpu", "fp32": 0.1, "mem_label_gb": 8, "mem_bw_gbs": 10, "link": "loopback"}
    gpu["measured"] = {"kernels": {"matmul": {"fp32": {"flops": 1e11, "launch_s": 0.0}}, "host": host}}
    (folder / "box.toml").write_text(tomli_w.dumps({"gpu": [gpu]}), encoding="utf-8")
    training = {"seq_len": 64, "global_batch_size": 8, "precision": "fp32"}
    strategy = {"framework": "fsdp2", "sharding": "none", "micro_batch_size": 2, **strategy}
    document = {"model": MODEL, "cluster": "2xbox", "training": training, "strategy": strategy}
    found = tw.estimate(document, catalog_files=(str(folder / "box.toml"),))
    assert sum(found.to_dict()["time"]["breakdown"].values()) == pytest.approx(found.step_s)
    return found.step_s


CASES = {
    # four layers and the ends are five groups: two micro-batches a rank, one reduction
    "replicas": ({"dp": 2}, 5 * 2 * 1 + 5 * 100),
    "shards, reduced each time": ({"dp": 2, "sharding": "zero3", "options": {"no_sync": False}}, 5 * 2 * 1 + 5 * 2 * 100),
    # six split products a layer and the head, in four micro-batches; a layer lays out two inputs and two outputs, forward and backward, the head one
    # input, and its logits are gathered; the two tables' sums are laid out both ways
    "tensors": (
        {"dp": 1, "tp": 2, "sequence_parallel": True},
        4 * (25 + 100 * (4 * 8 + 2 + 1 + 4)),
    ),
    # keys and values of 32 tokens go round once forward and once backward, their gradients once each way
    "a ring": ({"dp": 1, "cp": 2, "micro_batch_size": 8}, 5 + 500 + 4 * (1 + 1 + 2) * 8 * 32 * 2 * HIDDEN * 4),
    "a plain DDP": ({"framework": "ddp", "dp": 2}, 0),
    "stages": ({"dp": 1, "pp": 2}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_every_message_and_group_has_its_share(tmp_path: Path, name: str) -> None:
    strategy, expected = CASES[name]
    more = step(tmp_path, HOST, **strategy) - step(tmp_path, {"serial": 1.0}, **strategy)
    assert more == pytest.approx(expected, rel=1e-9)


def test_a_forward_pass_that_is_repeated_is_a_third_of_a_split_product(tmp_path: Path) -> None:
    host = {"serial": 1.0, "tp": {"product_s": 3.0}}
    strategy = {"dp": 1, "tp": 2, "recompute": "full", "micro_batch_size": 8}
    more = step(tmp_path, host, **strategy) - step(tmp_path, {"serial": 1.0}, **strategy)
    assert 15 < more - (24 * 3 + 3) < 24  # a checkpoint stops before a layer's last product, and the head runs once


def test_optimizers_step_split_tensors_one_by_one(tmp_path: Path) -> None:
    tensors = 4 * 16 + 2 + 2  # weights and biases of a layer; two tables; the final norm, whose head is tied
    host = {"serial": 1.0, "update_s": 1.0}
    assert step(tmp_path, host, dp=1, tp=2) - step(tmp_path, {"serial": 1.0}, dp=1, tp=2) == pytest.approx(tensors)


def test_a_gpu_s_host_runs_ahead(tmp_path: Path) -> None:
    assert step(tmp_path, {**HOST, "serial": 0.0}, dp=2) == pytest.approx(step(tmp_path, {"serial": 0.0}, dp=2))
