"""OLMo: Llama's block with a LayerNorm that has no weights (arXiv:2402.00838)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 50304, "intermediate_size": 11008, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))
    layer = pre_norm("layer", hidden, norms(hidden, "layer-no-weight"), attention(shape, qkv_bias=bias, out_bias=bias), mlp)
    both = ends(keys, hidden, kind="layer-no-weight")
    return make(keys, "olmo", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **both)


FAMILY = Family("olmo", ("olmo",), build)
