"""Whatever a configuration holds, the answer is a model or one line that names the key and what would be right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.catalog import tables
from trainwright.errors import SpecError
from trainwright.models import FAMILIES, build_model

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
DEEPSEEK = tables.document("models", "deepseek_v3", "deepseek-v3.json")
MIXTRAL = tables.document("models", "mixtral", "mixtral-8x7b.json")
QWEN3_NEXT = tables.document("models", "qwen3_next", "qwen3-next-80b-a3b.json")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "mine: has no model_type"),
        ({**LLAMA, "model_type": ""}, "mine: has no model_type"),
        ({**LLAMA, "model_type": None}, "mine: has no model_type"),
        ({**LLAMA, "model_type": 3}, "'3' is not a model_type"),
        ({**LLAMA, "model_type": "lama"}, r"mine: unknown model_type 'lama' \(nearest: llama"),
        ({**LLAMA, "model_type": "deepseek_v4"}, r"unknown model_type 'deepseek_v4' \(nearest: deepseek_v"),
        ({**LLAMA, "model_type": "keys"}, "unknown model_type 'keys'"),
        ({**LLAMA, "model_type": "../llama"}, "unknown model_type"),
        ({**LLAMA, "model_type": "os"}, "unknown model_type 'os'"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "mine: hidden_size is missing"),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "mine: num_hidden_layers is missing"),
        ({**LLAMA, "hidden_size": None}, "mine: hidden_size is missing"),
        ({**LLAMA, "hidden_size": -64}, r"mine.hidden_size: -64 is not between 1 and 1048576 \(nearest: 1\)"),
        ({**LLAMA, "hidden_size": 0}, "mine.hidden_size: 0 is not between"),
        ({**LLAMA, "hidden_size": 10**30}, "mine.hidden_size: 10{30} is not between"),
        ({**LLAMA, "hidden_size": 64.5}, r"mine.hidden_size: 64.5 is not a whole number \(nearest: 64, 65\)"),
        ({**LLAMA, "hidden_size": "64"}, "mine.hidden_size: '64' is not a whole number"),
        ({**LLAMA, "hidden_size": True}, "mine.hidden_size: 'True' is not a whole number"),
        ({**LLAMA, "hidden_size": float("nan")}, "mine.hidden_size: 'nan' is not a whole number"),
        ({**LLAMA, "hidden_size": float("inf")}, "mine.hidden_size: 'inf' is not a whole number"),
        ({**LLAMA, "rope_theta": float("nan")}, "mine.rope_theta: nan is no number"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "mine.rope_scaling.factor: inf is no number"),
        ({**LLAMA, "rope_scaling": "yes"}, "mine.rope_scaling: 'yes' is not a table"),
        ({**LLAMA, "hidden_size": [64]}, r"mine.hidden_size: '\[64\]' is not a whole number"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "mine.num_hidden_layers: 1000000 is not between 1 and 10000"),
        ({**LLAMA, "num_key_value_heads": 3}, r"mine.num_key_value_heads: 8 heads do not divide over 3 .*nearest: 1, 2, 4"),
        ({**LLAMA, "num_key_value_heads": 16}, "mine.num_key_value_heads: 8 heads do not divide over 16"),
        ({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7}, r"num_attention_heads: .* 64 does not divide over 7 heads \(nearest: 2, 4, 8"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "mine.tie_word_embeddings: 'yes' is not true or false"),
        ({**LLAMA, "attention_bias": 1}, "mine.attention_bias: '1' is not true or false"),
        ({**LLAMA, "hidden_act": "silou"}, r"mine.hidden_act: unknown activation 'silou' \(nearest: silu"),
        ({**LLAMA, "hidden_act": 3}, "mine.hidden_act: unknown activation '3'"),
        ({**{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "num_key_value_head": 2}, "unknown key 'num_key_value_head'"),
        ({**{k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "intermediat_size": 2}, "unknown key 'intermediat_size'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, r"mine.num_experts_per_tok: a token takes 9 of 8 experts \(nearest: 8\)"),
        ({**MIXTRAL, "num_local_experts": -1}, "mine.num_local_experts: -1 is not between"),
        ({**DEEPSEEK, "num_key_value_heads": 8}, r"mine.num_key_value_heads: latent attention has as many .*\(nearest: 128\)"),
        ({**DEEPSEEK, "first_k_dense_replace": -1}, "mine.first_k_dense_replace: -1 is not between 0"),
        ({**QWEN3_NEXT, "layer_types": ["full_attention"]}, "mine.layer_types: has 1 entries for 48 layers"),
        ({**QWEN3_NEXT, "layer_types": ["full"] * 48}, r"mine.layer_types: unknown kind of layer 'full' \(nearest: full_attention"),
        ({**QWEN3_NEXT, "layer_types": 3}, "mine.layer_types: is not a list of words"),
        ({**QWEN3_NEXT, "mlp_only_layers": ["a"]}, "mine.mlp_only_layers: is not a list of whole numbers"),
        ({**QWEN3_NEXT, "linear_num_key_heads": 5}, r"mine.linear_num_key_heads: 32 value heads do not divide over 5 key heads \(nearest: 2, 4, 8\)"),
        ({"model_type": "mpt", "d_model": 64, "n_layers": 1, "n_heads": 4, "attn_config": "alibi"}, "mine.attn_config: is not a table"),
        ({**tables.document("models", "smollm3", "smollm3-3b.json"), "no_rope_layers": [1, 0]}, "no_rope_layers: has 2 entries for 36 layers"),
    ],
)  # fmt: skip
def test_one_line_names_the_key_and_what_would_be_right(config: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError, match=line) as caught:
        build_model(config, "mine")
    assert "\n" not in str(caught.value)


def test_a_key_of_another_meaning_is_no_typo() -> None:
    """Near-misses that are real keys of their own: a configuration full of keys that nobody needs is read without complaint."""
    extra = {
        "rope_theta": 5e5, "rope_scaling": {"factor": 8.0}, "torch_dtype": "bfloat16", "original_max_position_embeddings": 8192,
        "moe_intermediate_size": 3, "use_sliding_window": False, "num_experts": 4, "v_head_dim": 3,
    }  # fmt: skip
    assert build_model({**LLAMA, **extra}).parameters == build_model(LLAMA).parameters


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 16), st.integers(0, 3), st.integers(1, 128), st.integers(1, 600), st.integers(1, 2000), st.integers(1, 12), st.booleans()
)
def test_any_llama_that_fits_has_the_parameters_of_the_formula(
    kv: int, power: int, dim: int, ffn: int, vocab: int, layers: int, tied: bool
) -> None:
    heads, hidden = kv * 2**power, 8 * kv
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": dim, "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip
    model = build_model(config)
    layer = 2 * hidden * dim * (heads + kv) + 3 * hidden * ffn + 2 * hidden
    assert model.parameters == layers * layer + hidden + vocab * hidden * (1 if tied else 2)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(0, 3), max_size=3),
    st.just({}),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_junk_in_any_key_of_any_family_never_breaks(data: st.DataObject) -> None:
    """Each family's catalogue entry with one to three keys replaced: a model, or a SpecError of one line; nothing else."""
    entries = tables.document("models.json")
    first = {entry["family"]: name for name, entry in reversed(entries.items())}
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    config = dict(tables.document("models", family, f"{first[family]}.json"))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(JUNK)
    try:
        assert build_model(config, "junk").parameters > 0
    except SpecError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
