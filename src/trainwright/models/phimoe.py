"""Phi-3.5-MoE: LayerNorm with bias, biased attention, sixteen experts of which two are taken, biased head (arXiv:2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, experts, norms, read_experts, read_heads

DEFAULTS = {
    "vocab_size": 32064, "intermediate_size": 6400, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2,
    "num_local_experts": 16,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    count, top_k = read_experts(keys, "num_local_experts", "num_experts")
    moe = experts(hidden, ffn, count, top_k, function=keys.function("hidden_act", default="silu"), router="router")
    part = attention(shape, qkv_bias=bias, out_bias=bias, window=keys.whole("sliding_window", default=None))
    layer = pre_norm("layer_moe", hidden, norms(hidden, "layer", bias=True), part, moe, tags={"moe"})
    both = ends(keys, hidden, kind="layer", norm_bias=True, bias=keys.flag("lm_head_bias"))
    return make(keys, "phimoe", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **both)


FAMILY = Family("phimoe", ("phimoe",), build)
