"""Kimi K2: DeepSeek-V3's layers with 384 experts, 64 heads and no multi-token prediction (arXiv:2507.20534)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .deepseek_v3 import deepseek
from .keys import Keys

DEFAULTS = {
    "vocab_size": 163840, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 64, "n_shared_experts": 1,
    "n_routed_experts": 384, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return deepseek(Keys(config, name, DEFAULTS), "kimi_k2", router_bias=True)


FAMILY = Family("kimi_k2", ("kimi_k2",), build)
