"""Nemotron-4 and Minitron: LayerNorm, squared ReLU without a gate, untied embeddings (arXiv:2402.16819, arXiv:2406.11704)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 256000, "intermediate_size": 24576, "num_attention_heads": 48}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    mlp = plain_mlp(hidden, ffn, keys.function("hidden_act", default="relu2"), bias=keys.flag("mlp_bias"))
    layer = pre_norm("layer", hidden, norms(hidden, "layer", bias=True), attention(shape, qkv_bias=bias, out_bias=bias), mlp)
    both = ends(keys, hidden, kind="layer", norm_bias=True)
    return make(keys, "nemotron", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim // 2), **both)


FAMILY = Family("nemotron", ("nemotron",), build)
