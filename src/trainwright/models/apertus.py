"""Apertus: norms on q and k, plain MLP with the xIELU activation, whose two slopes are learned (arXiv:2509.14233)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 131072, "intermediate_size": 14336, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    mlp = plain_mlp(hidden, ffn, keys.function("hidden_act", default="xielu"), bias=False)
    part = attention(shape, qkv_bias=bias, out_bias=bias, qk_norm="head")
    layer = pre_norm("layer", hidden, norms(hidden), part, mlp, names=("attention_layernorm", "feedforward_layernorm"))
    return make(keys, "apertus", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("apertus", ("apertus",), build)
