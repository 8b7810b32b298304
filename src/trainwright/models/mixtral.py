"""Mixtral: Mistral's attention, eight experts of which two are taken in every layer (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, experts, norms, read_experts, read_heads

DEFAULTS = {
    "vocab_size": 32000, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2,
    "num_local_experts": 8,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, window = read_heads(keys, hidden), keys.whole("sliding_window", default=None)
    count, top_k = read_experts(keys, "num_local_experts", "num_experts")
    moe = experts(hidden, ffn, count, top_k, function=keys.function("hidden_act", default="silu"))
    layer = pre_norm("layer_moe", hidden, norms(hidden), attention(shape, window=window), moe, tags={"moe"})
    return make(keys, "mixtral", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("mixtral", ("mixtral",), build)
