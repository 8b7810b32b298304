"""Mistral and Ministral: Llama's block, optionally with a sliding window in every layer or by ``layer_types`` (arXiv:2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 32000, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096}
LAYER_TYPES = ("full_attention", "sliding_attention")


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, window = read_heads(keys, hidden), keys.whole("sliding_window", default=None)
    types = keys.kinds("layer_types", layers, LAYER_TYPES) or ["sliding_attention"] * layers
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))

    def block(looks_back: int | None) -> Any:
        tags = {"sliding"} if looks_back else ()
        return pre_norm(label("sliding" if looks_back else ""), hidden, norms(hidden), attention(shape, window=looks_back), mlp, tags=tags)

    blocks = by_kind(layers, lambda i: window if types[i] == "sliding_attention" else None, block)
    return make(keys, "mistral", blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("mistral", ("mistral", "ministral", "ministral3"), build)
