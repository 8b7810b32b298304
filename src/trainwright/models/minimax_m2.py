"""MiniMax-M2: 256 experts of which 8 are taken in every layer, one norm over all of q and of k (MiniMax, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, experts, norms, read_experts, read_heads

DEFAULTS = {
    "vocab_size": 200064, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts_per_tok": 8, "num_local_experts": 256,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape = read_heads(keys, hidden)
    count, top_k = read_experts(keys, "num_local_experts", "num_experts")
    moe = experts(hidden, ffn, count, top_k, function=keys.function("hidden_act", default="silu"))
    layer = pre_norm("layer_moe", hidden, norms(hidden), attention(shape, qk_norm="all"), moe, tags={"moe"})
    rotary = keys.whole("rotary_dim", default=shape.head_dim // 2)
    return make(
        keys,
        "minimax_m2",
        [layer] * layers,
        buffer_bytes=rope_buffers(rotary),
        router_bias_elements=layers * count,
        **ends(keys, hidden),
    )


FAMILY = Family("minimax_m2", ("minimax_m2",), build)
