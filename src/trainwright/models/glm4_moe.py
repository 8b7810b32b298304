"""GLM-4.5: grouped-query attention with biases on q, k, v, dense first layers, then routed and shared experts (arXiv:2508.06471)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .deepseek_v3 import dense_then_moe, multi_token_prediction
from .keys import Keys
from .layers import ends, make, rope_buffers
from .parts import attention, read_heads

DEFAULTS = {
    "vocab_size": 151552, "intermediate_size": 10944, "num_attention_heads": 96, "num_key_value_heads": 8, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden = keys.hidden()
    shape = read_heads(keys, hidden)
    part = attention(shape, qkv_bias=keys.flag("attention_bias"), qk_norm="head" if keys.flag("use_qk_norm") else "")
    blocks, routers = dense_then_moe(keys, hidden, part)
    both = ends(keys, hidden)
    return make(
        keys,
        "glm4_moe",
        blocks,
        buffer_bytes=rope_buffers(shape.head_dim // 2),
        router_bias_elements=routers,
        mtp=multi_token_prediction(keys, hidden, both["vocab"], blocks[-1]),
        **both,
    )


FAMILY = Family("glm4_moe", ("glm4_moe",), build)
