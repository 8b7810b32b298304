"""LoRA's targets: every family has products to adapt by default, and other checkpoints' names for them are understood."""

from __future__ import annotations

import pytest

import trainwright as tw
from trainwright.catalog import tables
from trainwright.catalog.load import load_model
from trainwright.models.adapters import lora_targets

SMALLEST: dict[str, str] = {}
for _name, _entry in sorted(tables.document("models.json").items(), key=lambda item: item[1]["parameters"]):
    SMALLEST.setdefault(_entry["family"], _name)


@pytest.mark.parametrize("family", sorted(SMALLEST))
def test_every_family_has_attention_to_adapt(family: str) -> None:
    model = load_model(SMALLEST[family])
    found = lora_targets(model, None)
    assert len(found) >= 3
    assert not {"up_proj", "down_proj", "fc1", "fc2", "dense_h_to_4h"} & set(found)
    assert lora_targets(model, found) == found


@pytest.mark.parametrize(
    ("model", "said", "rows"),
    [
        ("pythia-70m", ["query_key_value"], ("query", "key", "value")),
        ("pythia-70m", ["dense"], ("dense",)),  # not dense_h_to_4h
        ("bloom-560m", ["q_proj", "v_proj"], ("query", "value")),
        ("gpt2", ["c_attn"], ("q_proj", "k_proj", "v_proj")),
        ("gpt2", ["c_proj"], ("o_proj", "down_proj")),
        ("mpt-7b", ["Wqkv"], ("query", "key", "value")),
        ("phi-3-mini", ["qkv_proj", "gate_up_proj"], ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
        ("deepseek-v3", ["q_proj"], ("q_a_proj", "q_b_proj")),
        ("opt-125m", ["gate_proj", "fc1"], ("fc1",)),
        ("llama-3.1-8b", ["all-linear"], ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_names_of_other_checkpoints(model: str, said: list[str], rows: tuple[str, ...]) -> None:
    assert lora_targets(load_model(model), said) == rows


@pytest.mark.parametrize(("said", "says"), [(["quary"], "query"), (["gate_proj"], "names no product"), ([], "names no product")])
def test_what_adapts_nothing_is_refused(said: list[str], says: str) -> None:
    with pytest.raises(tw.SpecError, match=says):
        lora_targets(load_model("pythia-70m"), said)


@pytest.mark.parametrize("framework", ["megatron", "fsdp2", "fsdp1", "ddp", "deepspeed"])
@pytest.mark.parametrize("model", ["pythia-70m", "bloom-560m", "falcon-7b", "mpt-7b"])
def test_a_model_without_q_proj_trains_adapters(model: str, framework: str) -> None:
    """With targets that match nothing, no state is trained and a checkpoint is empty: the answer was a division by zero."""
    run = {"model": model, "cluster": "8xH100", "training": {"method": "lora", "tokens": 1e9}, "strategy": {"framework": framework}}
    found = tw.estimate(run).to_dict()
    assert found["memory"]["states"]["optimizer"] > 0
    assert found["run"]["checkpoint_bytes"] > 0
    assert 0 < found["run"]["goodput"] < 1
