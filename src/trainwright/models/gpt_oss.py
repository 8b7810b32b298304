"""gpt-oss: attention with learned sinks, every second layer with a window of 128, biased experts and router (arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import attention, experts, norms, read_experts, read_heads

DEFAULTS = {
    "vocab_size": 201088, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_experts_per_tok": 4, "num_local_experts": 128, "sliding_window": 128,
}  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention")


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias", True)
    window = keys.whole("sliding_window", default=None)
    types = keys.kinds("layer_types", layers, LAYER_TYPES) or [LAYER_TYPES[(i + 1) % 2] for i in range(layers)]
    count, top_k = read_experts(keys, "num_local_experts", "num_experts")
    # The activation is SiLU with a slope of 1.702, clamped; as a kernel it is SiLU.
    moe = experts(hidden, ffn, count, top_k, function="silu", bias=True, router="router")

    def block(looks_back: int | None) -> Any:
        words = ("sliding" if looks_back else "", "moe")
        part = attention(shape, qkv_bias=bias, out_bias=bias, sinks=True, window=looks_back)
        return pre_norm(label(*words), hidden, norms(hidden), part, moe, tags={w for w in words if w})

    blocks = by_kind(layers, lambda i: window if types[i] == "sliding_attention" else None, block)
    return make(keys, "gpt_oss", blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("gpt_oss", ("gpt_oss",), build)
