"""Phi-1.5 and Phi-2: attention and MLP side by side after one LayerNorm, biases everywhere, the head included (arXiv:2309.05463)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, parallel, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 51200, "intermediate_size": 8192, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape = read_heads(keys, hidden)
    part = attention(
        shape,
        qkv_bias=True,
        out_bias=True,
        qk_norm="head" if keys.flag("qk_layernorm") else "",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_function="layer",
        qk_norm_bias=True,
        names=("q_proj", "k_proj", "v_proj", "dense"),
    )
    mlp = plain_mlp(hidden, ffn, keys.function("hidden_act", default="gelu-tanh"), names=("fc1", "fc2"))
    layer = parallel("layer", hidden, norms(hidden, "layer", bias=True), part, mlp)
    both = ends(keys, hidden, kind="layer", norm_bias=True, bias=True, norm_name="final_layernorm")
    return make(keys, "phi", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim // 2), **both)


FAMILY = Family("phi", ("phi",), build)
