"""OLMoE: 64 small experts of which 8 are taken, one norm over all of q and of k (arXiv:2409.02060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, experts, norms, read_experts, read_heads

DEFAULTS = {"vocab_size": 50304, "intermediate_size": 2048, "num_attention_heads": 16, "num_experts_per_tok": 8, "num_experts": 64}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    count, top_k = read_experts(keys, "num_experts", "num_local_experts")
    moe = experts(hidden, ffn, count, top_k, function=keys.function("hidden_act", default="silu"))
    part = attention(shape, qkv_bias=bias, out_bias=bias, qk_norm="all")
    layer = pre_norm("layer_moe", hidden, norms(hidden), part, moe, tags={"moe"})
    return make(keys, "olmoe", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("olmoe", ("olmoe",), build)
