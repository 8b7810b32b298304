"""Phi-3 and Phi-4: Llama's block; its fused projections hold the same bytes as the rows here (arXiv:2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 32064, "intermediate_size": 8192, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, window = read_heads(keys, hidden), keys.whole("sliding_window", default=None)
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))
    layer = pre_norm("layer", hidden, norms(hidden), attention(shape, window=window), mlp, tags={"sliding"} if window else ())
    return make(keys, "phi3", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("phi3", ("phi3",), build)
