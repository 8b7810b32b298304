"""Every rule of the planner prompt against the planner. A rule is named R1, R2, ... in the text; each has a test here of the same name."""

from __future__ import annotations

import re
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw

PROMPT = (Path(__file__).parents[2] / "outputs" / "prompt-distributed-training-planner.md").read_text()
LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496
GPT = {"model_type": "gpt2", "n_layer": 24, "n_embd": 2048, "n_head": 16, "n_positions": 2048, "vocab_size": 51200}


def estimate(model: Any, on: str, training: dict[str, Any] | None = None, **strategy: Any) -> dict[str, Any]:
    spec = {
        "model": model,
        "cluster": on,
        "training": {"seq_len": 8192, "global_batch_size": 512, **(training or {})},
        "strategy": strategy,
    }
    return tw.estimate(spec).to_dict()


def states(found: dict[str, Any]) -> int:
    return sum(found["memory"]["states"].values())


def test_every_rule_is_tested_and_every_test_has_a_rule() -> None:
    rules = {int(n) for n in re.findall(r"\*\*R(\d+)", PROMPT)}
    tests = {int(m[1]) for name in globals() if (m := re.match(r"test_r(\d+)_", name))}
    assert rules == tests == set(range(1, max(rules) + 1))


def test_r1_bytes_of_state_a_parameter() -> None:
    fsdp = estimate("llama-3.1-8b", "8xH100", framework="fsdp2", sharding="zero3", dp=8)
    assert states(fsdp) * 8 / LLAMA_8B == pytest.approx(16, rel=1e-3)
    one = {"framework": "megatron", "sharding": "none", "dp": 1}
    assert states(estimate("llama-3.1-8b", "1xH100", **one)) / LLAMA_8B == pytest.approx(18, rel=1e-3)
    half = {"gradient_dtype": "bf16"}
    assert states(estimate("llama-3.1-8b", "1xH100", half, **one)) / LLAMA_8B == pytest.approx(16, rel=1e-3)


def test_r2_what_each_zero_stage_divides() -> None:
    plain = estimate("llama-3.1-8b", "8xH100", framework="megatron", sharding="none", dp=8)["memory"]["states"]
    one = estimate("llama-3.1-8b", "8xH100", framework="megatron", sharding="zero1", dp=8)["memory"]["states"]
    for part in ("master_weights", "optimizer"):
        assert one[part] == pytest.approx(plain[part] / 8, rel=1e-3)
    assert (one["parameters"], one["gradients"]) == (plain["parameters"], plain["gradients"])
    two = estimate("llama-3.1-8b", "8xH100", framework="deepspeed", sharding="zero2", dp=8)["memory"]["states"]
    three = estimate("llama-3.1-8b", "8xH100", framework="deepspeed", sharding="zero3", dp=8)["memory"]["states"]
    assert two["gradients"] == pytest.approx(three["gradients"], rel=0.02)
    assert three["parameters"] == pytest.approx(two["parameters"] / 8, rel=0.02)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_r3_activations_of_a_layer(t: int) -> None:
    s, b, h, heads, layers = 2048, 2, 2048, 16, 24
    training = {"seq_len": s, "global_batch_size": 16, "dropout": 0.1}
    layout = {"framework": "megatron", "tp": t, "dp": 8 // t, "sequence_parallel": t > 1, "micro_batch_size": b, "sharding": "none"}
    for attention, scores in (("flash", 0), ("eager", 5 * heads * s * s * b)):
        found = estimate(GPT, "8xH100", training, attention=attention, **layout)["memory"]["saved_bytes"] / layers
        without_logits = estimate({**GPT, "n_layer": 12}, "8xH100", training, attention=attention, **layout)["memory"]["saved_bytes"]
        layer = (found * layers - without_logits) / 12
        assert layer == pytest.approx((34 * s * b * h + scores) / t, rel=0.03)


def test_r4_full_recomputation_keeps_little_and_costs_a_third() -> None:
    layout = {"framework": "megatron", "tp": 8, "dp": 8, "sharding": "zero1", "sequence_parallel": False}
    found = estimate("llama-3.1-70b", "64xH100", recompute="full", **layout)
    fewer = estimate("llama-3.1-70b", "64xH100", recompute="none", **layout)
    assert found["memory"]["saved_bytes"] < fewer["memory"]["saved_bytes"] / 5
    assert found["memory"]["saved_bytes"] >= 80 * 2 * 8192 * 8192 / 8
    share = found["time"]["breakdown"]["recompute"] / found["time"]["breakdown"]["compute"]
    assert 0.2 < share < 0.34  # one forward of three passes; the largest kernels of backward are a little more efficient


def test_r5_logits() -> None:
    found = estimate("llama-3.1-8b", "8xH100", {"loss": "plain"}, framework="fsdp2", sharding="zero3", dp=8, recompute="full")
    assert 10 <= found["memory"]["breakdown"]["logits"] / (8192 * 128256) <= 16
    chunked = estimate("llama-3.1-8b", "8xH100", {"loss": "fused"}, framework="fsdp2", sharding="zero3", dp=8, recompute="full")
    assert chunked["memory"]["breakdown"]["logits"] < found["memory"]["breakdown"]["logits"] / 2


def test_r6_what_is_no_tensor() -> None:
    for framework, sharding in (("fsdp2", "zero3"), ("megatron", "zero1"), ("deepspeed", "zero3")):
        found = estimate("llama-3.1-8b", "8xH100", framework=framework, sharding=sharding, dp=8)
        assert 0.5 * 2**30 < found["memory"]["breakdown"]["framework"] < 2.5 * 2**30


def test_r7_tensor_parallelism_stays_inside_a_node() -> None:
    inside = estimate("llama-3.1-70b", "64xH100", framework="megatron", tp=8, dp=8, sharding="zero1", recompute="full")
    across = estimate("llama-3.1-70b", "64xH100", framework="megatron", tp=16, dp=4, sharding="zero1", recompute="full")
    assert across["time"]["step_s"] > 1.2 * inside["time"]["step_s"]


def test_r8_the_batch_equation() -> None:
    found = tw.estimate(
        {"model": "7B", "cluster": "8xH100", "training": {"global_batch_size": 96, "seq_len": 2048}, "strategy": {"micro_batch_size": 2}}
    )
    assert found.plan.micro_batch_size * found.plan.accumulation * found.plan.dp == 96
    with pytest.raises(tw.SpecError):
        estimate("7B", "8xH100", {"global_batch_size": 12}, dp=8)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32), (4, 18)])
def test_r9_pipelines(p: int, m: int) -> None:
    idle = (p - 1) / (m + p - 1)
    plain, one = tw.schedule("gpipe", stages=p, microbatches=m), tw.schedule("1f1b", stages=p, microbatches=m)
    assert plain.bubble_total == pytest.approx(idle)
    assert one.bubble_total == pytest.approx(idle)
    assert max(plain.peak_per_rank) == m
    assert max(one.peak_per_rank) == min(p, m)
    if m % p == 0:
        chunks = tw.schedule("interleaved-1f1b", stages=p, microbatches=m, virtual_stages=2)
        assert chunks.bubble_total == pytest.approx((p - 1) / (2 * m + p - 1))
    assert (idle < 0.15) == (m >= 6 * (p - 1)) or m / (p - 1) > 5.6


ROW = re.compile(r"^\| (\d+B) \| ([\d,]+) \| (FSDP2|Megatron) \| (.*) \|$", re.M)


def layout_of(text: str, framework: str) -> dict[str, Any]:
    """The strategy that a row of the table says in words."""
    number = lambda word: int(m[1]) if (m := re.search(rf"{word} (\d+)", text)) else 1  # noqa: E731
    chunks = int(m[1]) if (m := re.search(r"(\d+) chunks", text)) else 1
    zero = re.search(r"ZeRO-(\d)", text)
    assert zero
    found = {"framework": framework.lower(), "dp": number("data"), "tp": number("tensor"), "pp": number("stages"), "cp": number("context")}
    found |= {"sharding": f"zero{zero[1]}", "micro_batch_size": number("micro-batch"), "virtual_stages": chunks}
    found |= {"recompute": "full" if "full recomputation" in text else "none", "sequence_parallel": found["tp"] > 1}
    return (
        found | ({"schedule": "interleaved-1f1b"} if chunks > 1 else {}) | ({"options": {"no_sync": False}} if framework == "FSDP2" else {})
    )


@pytest.mark.parametrize(("size", "gpus", "framework", "layout"), ROW.findall(PROMPT))
def test_r10_starting_points(size: str, gpus: str, framework: str, layout: str) -> None:
    training = {"seq_len": 8192, "global_batch_size": 512}
    base = {"model": f"llama-3.1-{size.lower()}", "cluster": f"{gpus.replace(',', '')}xH100", "training": training}
    found = tw.estimate({**base, "strategy": layout_of(layout, framework)})
    assert found.fits
    best = tw.plan({**base, "strategy": {"framework": framework.lower()}}, top=1)[0]
    assert found.step_s <= 1.15 * best.step_s


def payload(found: dict[str, Any], *groups: str) -> float:
    return sum(c["bytes_per_rank"] for c in found["communication"] if c["group"] in groups)


def test_r11_data_parallel_traffic() -> None:
    """An all-reduce carries its message twice round the ring, a gather or a scatter once: weigh them so."""

    def sent(found: dict[str, Any]) -> float:
        twice = {"all_reduce": 2}
        return sum(c["bytes_per_rank"] * twice.get(c["collective"], 1) for c in found["communication"])

    training = {"global_batch_size": 8, "precision": "bf16", "master_weights": "none", "gradient_dtype": "bf16"}
    ddp = estimate("llama-3.1-8b", "8xH100", training, framework="ddp", sharding="none", dp=8)
    zero3 = estimate("llama-3.1-8b", "8xH100", training, framework="fsdp2", sharding="zero3", dp=8)
    assert sent(ddp) == pytest.approx(2 * 2 * LLAMA_8B, rel=0.01)
    assert sent(zero3) == pytest.approx(1.5 * sent(ddp), rel=0.02)
    more = {**training, "global_batch_size": 32}
    assert sent(estimate("llama-3.1-8b", "8xH100", more, framework="ddp", sharding="none", dp=8)) == sent(ddp)
    assert sent(estimate("llama-3.1-8b", "8xH100", more, framework="fsdp2", sharding="zero3", dp=8)) > 2 * sent(zero3)


def test_r12_tensor_parallel_traffic() -> None:
    found = estimate("llama-3.1-70b", "8xH100", {"global_batch_size": 1}, framework="megatron", tp=8, dp=1, sequence_parallel=False)
    layer = 4 * 2 * 8192 * 8192
    assert payload(found, "tp") == pytest.approx(80 * layer, rel=0.05)


@pytest.mark.parametrize(
    ("model", "layers", "width", "parameters"), [("llama-3.1-8b", 32, 4096, LLAMA_8B), ("llama-3.1-70b", 80, 8192, LLAMA_70B)]
)
def test_r13_flops(model: str, layers: int, width: int, parameters: int) -> None:
    run = tw.estimate(
        {"model": model, "cluster": "64xH100", "training": {"seq_len": 8192, "global_batch_size": 512}, "strategy": {"dp": 64}}
    )
    tokens = 8192 * 512
    by_rule = 6 * parameters * tokens + 6 * layers * 8192 * width * tokens
    found = run.to_dict()["throughput"]["model_tflops_per_gpu"] * 1e12 * 64 * run.step_s
    assert by_rule == pytest.approx(found, rel=0.07)


@pytest.mark.parametrize(
    "on", ["8xH100", pytest.param("8xA100-80GB", marks=pytest.mark.slow), "64xA100-80GB", pytest.param("64xH100", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("framework", ["fsdp2", "megatron"])
def test_r14_utilization(on: str, framework: str) -> None:
    training = {"seq_len": 4096, "global_batch_size": 1024}
    best = tw.plan({"model": "llama-2-7b", "cluster": on, "training": training, "strategy": {"framework": framework}}, top=1)[0]
    assert 0.35 <= best.to_dict()["throughput"]["mfu"] <= 0.61


def test_r15_cost_and_checkpoints() -> None:
    spec = {"model": "llama-3.1-405b", "cluster": "16384xH100", "training": {"seq_len": 8192, "global_batch_size": 2048, "tokens": 15e12}}
    layout = {"framework": "megatron", "tp": 8, "pp": 16, "dp": 128, "sharding": "zero1"}
    run = tw.estimate({**spec, "strategy": layout}).to_dict()["run"]
    assert run["gpu_hours"] == pytest.approx(16384 * run["days"] * 24, rel=1e-6)
    price = run["cost_usd"] / run["gpu_hours"]
    assert 1 < price < 10
    shorter = tw.estimate({**spec, "cluster": "4096xH100", "strategy": {**layout, "dp": 32}}).to_dict()["run"]
    # four times the GPUs fail four times as often, so the interval halves where saving takes as long
    assert 1 / 4.5 < run["checkpoint_interval_s"] / shorter["checkpoint_interval_s"] < 1 / sqrt(4) + 0.05
