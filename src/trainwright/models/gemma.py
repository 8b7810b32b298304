"""Gemma: RMSNorm, GELU-gated MLP, heads of 256, tied embeddings (arXiv:2403.08295)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 256000, "intermediate_size": 24576, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    # ``hidden_act`` says "gelu" in the first files; the weights were trained with the tanh form and transformers takes it for that.
    layer = pre_norm("layer", hidden, norms(hidden), attention(shape, qkv_bias=bias, out_bias=bias), gated_mlp(hidden, ffn, "gelu-tanh"))
    return make(keys, "gemma", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden, tied=True))


FAMILY = Family("gemma", ("gemma",), build)
