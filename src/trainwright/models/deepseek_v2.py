"""DeepSeek-V2: latent attention, a dense first layer, then routed and shared experts (arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .deepseek_v3 import deepseek
from .keys import Keys

DEFAULTS = {
    "vocab_size": 102400, "intermediate_size": 11008, "num_attention_heads": 32, "first_k_dense_replace": 0, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return deepseek(Keys(config, name, DEFAULTS), "deepseek_v2", router_bias=False)


FAMILY = Family("deepseek_v2", ("deepseek_v2",), build)
