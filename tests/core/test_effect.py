"""A key of a run spec changes the answer, or a line says that it does not: nobody believes in a saving that is not there."""

from __future__ import annotations

from typing import Any

import pytest

import trainwright as tw
from trainwright.errors import SpecError
from trainwright.frameworks import FRAMEWORKS

MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 32000,
}  # fmt: skip
SHARDING = {"megatron": "zero1", "fsdp2": "zero3", "fsdp1": "zero3", "ddp": "none", "deepspeed": "zero2"}
# key: (value, what has to stand beside it)
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "training.autocast": (True, {}),
    "training.gradient_dtype": ("fp32", {}),
    "training.optimizer_in_backward": (True, {}),
    "training.dropout": (0.1, {}),
    "training.packing": (True, {}),
    "training.mean_document_len": (512, {}),
    "training.loss": ("chunked", {}),
    "training.loss_chunks": (4, {}),
    "training.lora_rank": (64, {}),
    "training.lora_targets": (["q_proj"], {}),
    "training.base_quantization": ("int8", {}),
    "training.moe_capacity_factor": (1.5, {}),
    "training.fp8_recipe": ("rowwise", {}),
    "strategy.async_tp": (True, {"strategy.tp": 2}),
    "strategy.fp8_params": (True, {"training.precision": "fp8"}),
    "strategy.recompute_every": (2, {"strategy.recompute": "selective"}),
    "strategy.reshard_root": (False, {"training.loss": "vocab-parallel"}),
    "strategy.compile": (True, {}),
    "strategy.attention": ("eager", {}),
    "strategy.cuda_graphs": (True, {}),
}


def answer(framework: str, **keys: Any) -> tuple[dict[str, Any], list[str]]:
    """(memory, time and messages; what is said) of a run with dotted keys."""
    document: dict[str, Any] = {
        "model": MODEL,
        "cluster": "8xH100",
        "training": {"seq_len": 1024, "global_batch_size": 8, "gradient_dtype": "bf16"},
        "strategy": {"framework": framework, "sharding": SHARDING[framework]},
    }
    for key, value in keys.items():
        section, name = key.split(".")
        document[section][name] = value
    found = tw.estimate(document).to_dict()
    return {k: found[k] for k in ("memory", "time", "communication")}, found["warnings"]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_every_key_changes_something_or_is_said_not_to(framework: str) -> None:
    silent = []
    for key, (value, beside) in KEYS.items():
        before, _ = answer(framework, **beside)
        after, said = answer(framework, **beside, **{key: value})
        if after == before and not any(line.startswith(f"{key}:") and "has no effect" in line for line in said):
            silent.append(key)
    assert not silent


def test_one_reason_is_enough() -> None:
    _, said = answer("megatron", **{"training.precision": "fp32", "training.gradient_dtype": "fp32", "training.autocast": True})
    assert [line for line in said if "autocast" in line] == [
        "training.autocast: true has no effect with Megatron-Core, which casts the weights itself"
    ]


def test_a_framework_says_why() -> None:
    _, said = answer("megatron", **{"training.loss": "chunked", "training.autocast": True})
    assert "training.loss: chunked has no effect with Megatron-Core, which splits the loss over the vocabulary" in said
    assert "training.autocast: true has no effect with Megatron-Core, which casts the weights itself" in said


def test_gradients_of_ddp_are_those_of_its_weights() -> None:
    """What nobody said is filled with what is there, so that a filled spec says nothing wrong."""
    document = {"model": MODEL, "cluster": "2xH100", "strategy": {"framework": "ddp"}}
    assert tw.estimate(document).to_dict()["spec"]["training"]["gradient_dtype"] == "bf16"
    autocast = {**document, "training": {"autocast": True}}
    assert tw.estimate(autocast).to_dict()["spec"]["training"]["gradient_dtype"] == "fp32"
    _, said = answer("ddp", **{"training.gradient_dtype": "fp32"})
    assert [line for line in said if "gradient_dtype" in line] == [
        "training.gradient_dtype: fp32 has no effect with PyTorch DDP here, whose gradients are reduced in bf16"
    ]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_filled_spec_is_read_back_without_a_word(framework: str) -> None:
    for training in ({}, {"autocast": True}, {"master_weights": "none"}, {"precision": "fp32"}):
        document = {"model": MODEL, "cluster": "8xH100", "training": training, "strategy": {"framework": framework}}
        once = tw.estimate(document).to_dict()
        assert tw.estimate(once["spec"]).to_dict()["warnings"] == once["warnings"]


def test_a_search_says_it_too() -> None:
    plans = tw.plan(
        {"model": MODEL, "cluster": "2xH100", "training": {"optimizer_in_backward": True}, "strategy": {"framework": "deepspeed"}}, top=1
    )
    assert any(line.startswith("training.optimizer_in_backward:") for line in plans.warnings)


@pytest.mark.parametrize(("precision", "wanted"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_sixteen_bits_are_not_all_alike(precision: str, wanted: str) -> None:
    """As many bytes, but not what DDP reduces."""
    _, said = answer("ddp", **{"training.precision": precision, "training.gradient_dtype": wanted})
    assert f"training.gradient_dtype: {wanted} has no effect with PyTorch DDP here, whose gradients are reduced in {precision}" in said
    _, own = answer("ddp", **{"training.precision": precision, "training.gradient_dtype": precision})
    assert not [line for line in own if "gradient_dtype" in line]


@pytest.mark.parametrize(
    ("precision", "wanted", "there"), [("fp32", "bf16", "fp32"), ("fp16", "bf16", "fp16"), ("bf16", "bf16", None), ("fp16", "fp32", None)]
)
def test_gradients_of_megatron_are_fp32_or_those_of_its_weights(precision: str, wanted: str, there: str | None) -> None:
    """Its buffer is of the parameters' type unless it sums in fp32: no 16-bit gradients of fp32 weights."""
    found, said = answer("megatron", **{"training.precision": precision, "training.gradient_dtype": wanted})
    line = f"training.gradient_dtype: {wanted} has no effect with Megatron-Core here, whose gradients are reduced in {there}"
    assert [x for x in said if "gradient_dtype" in x] == ([] if there is None else [line])
    parameters = found["memory"]["states"]["parameters"] / (4 if precision == "fp32" else 2)
    assert found["memory"]["states"]["gradients"] == pytest.approx(parameters * (4 if "fp32" in (precision, wanted) else 2), rel=0.01)


def test_deepspeed_adds_up_in_another_type_with_zero_alone() -> None:
    """Its engine refuses the mix where no ZeRO optimizer accumulates; with one, a sum in half the bytes is a saving."""
    asked = {"training.precision": "fp32", "training.gradient_dtype": "bf16"}
    narrow, said = answer("deepspeed", **asked, **{"strategy.sharding": "zero2"})
    whole, _ = answer("deepspeed", **asked | {"training.gradient_dtype": "fp32"}, **{"strategy.sharding": "zero2"})
    assert not [x for x in said if "gradient_dtype" in x]
    assert narrow["memory"]["states"]["gradients"] == pytest.approx(whole["memory"]["states"]["gradients"] / 2, rel=0.01)
    with pytest.raises(SpecError, match=r"DeepSpeed has fp32 gradients of fp32 weights without ZeRO, not bf16"):
        answer("deepspeed", **asked, **{"strategy.sharding": "none"})


@pytest.mark.parametrize("framework", sorted(name for name, f in FRAMEWORKS.items() if f.memory.autocasts))
def test_autocast_needs_a_narrower_format_and_has_its_own_say_on_weights(framework: str) -> None:
    """In fp32 there is nothing to cast to; in 16 bits weights are fp32 whatever is said of masters."""
    wide = {"training.precision": "fp32", "training.gradient_dtype": "fp32"}
    before, _ = answer(framework, **wide)
    after, said = answer(framework, **wide, **{"training.autocast": True})
    assert after == before
    assert "training.autocast: true has no effect in training.precision fp32" in said
    before, said = answer(framework, **{"training.autocast": True})
    assert not [line for line in said if "master_weights" in line or "training.autocast" in line]
    after, said = answer(framework, **{"training.autocast": True, "training.master_weights": "none"})
    assert after == before
    assert "training.master_weights: none has no effect with training.autocast, whose weights are fp32" in said
