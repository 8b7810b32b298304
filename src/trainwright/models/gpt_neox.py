"""GPT-NeoX and Pythia: attention and MLP side by side, each after a LayerNorm of its own, biases everywhere (arXiv:2204.06745)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, parallel, pre_norm, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 50432, "intermediate_size": 24576, "num_attention_heads": 64}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias", True)
    part = attention(shape, qkv_bias=bias, out_bias=bias, prefix="attention.", names=("query", "key", "value", "dense"))
    mlp = plain_mlp(hidden, ffn, keys.function("hidden_act", default="gelu"), names=("dense_h_to_4h", "dense_4h_to_h"))
    form = parallel if keys.flag("use_parallel_residual", True) else pre_norm
    layer = form("layer", hidden, norms(hidden, "layer", bias=True), part, mlp, names=("input_layernorm", "post_attention_layernorm"))
    both = ends(keys, hidden, kind="layer", norm_bias=True, norm_name="final_layer_norm", embed="embed_in")
    return make(keys, "gpt_neox", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim // 4), **both)


FAMILY = Family("gpt_neox", ("gpt_neox",), build)
