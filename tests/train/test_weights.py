"""Hugging Face's layout: a tiny random model of transformers, read from its own files, gives the same logits and gradients; what we write it reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from layouts import MODELS

from trainwright.catalog.load import load_model
from trainwright.errors import SpecError
from trainwright.train import weights
from trainwright.train.decoder import build

LLAMA = MODELS["llama"]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": MODELS["gpt"],
    "llama": LLAMA,
    "llama, tied": MODELS["tied"],
    "llama 3 rope": {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama, biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "mixtral": MODELS["moe"],
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}


def theirs(config: dict[str, Any], folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    values = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config["model_type"], **values))
    for p in made.parameters():  # norms and biases too, so that each must be in its place
        torch.nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.1)
    made.save_pretrained(folder)
    return made.eval()  # GPT-2 drops out by default


def ours(config: dict[str, Any], folder: Path) -> Any:
    model = load_model(config)
    part = build(model, attention="eager", device="cpu", dtype=torch.float32)
    weights.load(model, folder, part.named_parameters())
    return part


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_logits_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    other, mine = theirs(config, tmp_path), ours(config, tmp_path)
    tokens = torch.arange(48).view(2, 24) * 5 % config["vocab_size"]
    expected, found = other(input_ids=tokens).logits, mine(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    expected.square().mean().backward()
    found.square().mean().backward()
    embedding = other.get_input_embeddings().weight.grad
    torch.testing.assert_close(next(mine.parameters()).grad, embedding, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_is_read_back_by_both(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = FAMILIES[family]
    other = theirs(config, tmp_path / "theirs")
    mine = ours(config, tmp_path / "theirs")
    weights.save(mine.model, dict(mine.named_parameters()), tmp_path / "ours", shard_bytes=100_000)
    assert (tmp_path / "ours" / weights.INDEX).exists()
    again, back = ours(config, tmp_path / "ours"), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, p), (_, q) in zip(mine.named_parameters(), again.named_parameters()):
        assert torch.equal(p, q), name
    for (name, p), (_, q) in zip(other.named_parameters(), back.named_parameters()):
        assert torch.equal(p, q), name


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = load_model(LLAMA)
    part = build(model, device="cpu")
    with pytest.raises(SpecError, match="neither model"):
        weights.load(model, tmp_path, part.named_parameters())
    weights.save(model, {n: torch.zeros_like(p) for n, p in part.named_parameters()}, tmp_path)
    wider = load_model({**LLAMA, "intermediate_size": 256})
    with pytest.raises(SpecError, match=r"gate_proj.weight is \(128, 64\) in .*\(256, 64\) in the model"):
        weights.load(wider, tmp_path, build(wider, device="cpu").named_parameters())
    with pytest.raises(SpecError, match="of another model"):
        weights.load(load_model(MODELS["gpt"]), tmp_path, build(load_model(MODELS["gpt"]), device="cpu").named_parameters())
    (tmp_path / weights.SINGLE).write_bytes(b"no tensors")
    with pytest.raises(SpecError, match="cannot be read"):
        weights.load(model, tmp_path, part.named_parameters())
