"""Requests of the allocator that people posted, and the tensors behind them."""

from __future__ import annotations

import pytest

from trainwright.cost.oom import explain_allocation, read_allocation
from trainwright.errors import SpecError
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan, Structure

GPU = GpuSpec(
    "H100", (), "NVIDIA", "SXM", "9.0", 132, {"bf16": 989e12}, 80, 81559 * 2**20, "HBM3", 3.35e12, "NVLink", 450e9, 8, 8, 400, 64e9, 700
)
CLUSTER = ClusterSpec(GPU, 1, 8, 8, 50e9)
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def explain(text: str, config: dict, job: TrainingJob, top: int = 5, **plan: object) -> list:
    degrees = {k: plan.pop(k) for k in ("tp", "dp_shard", "micro_batch_size", "accumulation") if k in plan}
    return explain_allocation(text, build_model(config, "m"), CLUSTER, job, ParallelPlan(Structure(**plan), **degrees), top)


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("CUDA out of memory. Tried to allocate 9.47 GiB (GPU 0; 79.1 GiB total capacity)", round(9.47 * 2**30)),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 3 has a total capacity of 23.69 GiB", 250 * 2**20),
        ("Tried to allocate 2.00 GB", 2 * 10**9),
        ("26.08 GiB", round(26.08 * 2**30)),
        ("tried to allocate 1073741824 bytes", 2**30),
    ],
)
def test_the_request_is_read(text: str, bytes_: int):
    assert read_allocation(text)[0] == bytes_


@pytest.mark.parametrize("text", ["out of memory", "", "Tried to allocate lots"])
def test_a_text_without_a_size_is_refused(text: str):
    with pytest.raises(SpecError, match="names no size"):
        read_allocation(text)


def test_logits_in_fp32():
    """9.47 GiB = 19,820 tokens x 128,256 x 4 bytes."""
    found = explain("Tried to allocate 9.47 GiB", LLAMA_8B, TrainingJob(19820, 8, master_weights="none"), dp_shard=8)
    assert "logits in fp32" in found[0].what
    assert "19,820 tokens x 128,256 vocabulary x 4 bytes" in found[0].formula
    assert found[0].error == 0
    assert "chunked" in found[0].advice


def test_a_flat_buffer_of_all_parameters():
    """26.08 GiB = 7.0e9 x 4 bytes: fp32 gradients or masters of a 7B model in one piece."""
    config = LLAMA_8B | {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 64000}
    model = build_model(config, "7b")
    assert model.parameters * 4 / 2**30 == pytest.approx(26.08, abs=0.02)
    text = f"Tried to allocate {model.parameters * 4 / 2**30:.2f} GiB"
    found = explain(text, config, TrainingJob(512, 1), framework="deepspeed", sharding="zero1")
    assert "all parameters" in found[0].what
    assert "fp32" in found[0].what


def test_scores_of_eager_attention():
    """2 x 32 heads x 8192 x 8192 x 2 bytes = 8 GiB."""
    found = explain(
        "Tried to allocate 8.00 GiB",
        LLAMA_8B,
        TrainingJob(8192, 2),
        framework="ddp",
        sharding="none",
        attention="eager",
        micro_batch_size=2,
    )
    assert "scores" in found[0].what
    assert "flash" in found[0].advice


def test_a_length_that_the_plan_does_not_know():
    """Samples of varying length: the plan's cap is 32,768 tokens, the request names 19,820."""
    found = explain("Tried to allocate 9.47 GiB", LLAMA_8B, TrainingJob(32768, 8, master_weights="none"), top=100, dp_shard=8)
    logits = next(s for s in found if s.what.startswith("logits in fp32"))
    assert "19,820 tokens would be the request" in logits.formula or "19,821 tokens" in logits.formula


def test_the_nearest_come_first():
    found = explain("Tried to allocate 3.00 GiB", LLAMA_8B, TrainingJob(4096, 8), top=20, dp_shard=8)
    errors = [abs(s.error) for s in found]
    assert errors == sorted(errors)
    assert len(found) == 20
