"""StarCoder2: LayerNorm, biases everywhere, grouped-query attention, plain GELU MLP (arXiv:2402.19173)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 49152, "intermediate_size": 12288, "num_attention_heads": 24, "num_key_value_heads": 2}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias, window = read_heads(keys, hidden), keys.flag("use_bias", True), keys.whole("sliding_window", default=None)
    mlp = plain_mlp(hidden, ffn, keys.function("hidden_act", default="gelu-tanh"), bias=bias, names=("c_fc", "c_proj"))
    part = attention(shape, qkv_bias=bias, out_bias=bias, window=window)
    layer = pre_norm("layer", hidden, norms(hidden, "layer", bias=True), part, mlp, tags={"sliding"} if window else ())
    both = ends(keys, hidden, tied=True, kind="layer", norm_bias=True)
    return make(keys, "starcoder2", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **both)


FAMILY = Family("starcoder2", ("starcoder2",), build)
