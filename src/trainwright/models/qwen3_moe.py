"""Qwen3-MoE: Qwen3's attention, routed experts without a shared one (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .parts import read_heads
from .qwen2_moe import qwen_moe

DEFAULTS = {
    "vocab_size": 151936, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    bias = keys.flag("attention_bias")
    shape = read_heads(keys, keys.hidden())
    return qwen_moe(keys, "qwen3_moe", shape, {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}, shared=False)


FAMILY = Family("qwen3_moe", ("qwen3_moe", "qwen3_vl_moe_text"), build)
