"""Gemma 2: norms before and after both parts, every second layer with a sliding window (arXiv:2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, rope_buffers, sandwich
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {
    "vocab_size": 256000,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return gemma_sandwich(Keys(config, name, DEFAULTS), "gemma2", every=2)


def gemma_sandwich(keys: Keys, family: str, *, every: int, qk_norm: str = "") -> ModelSpec:
    """Gemma 2 and 3: every `every`-th layer sees the whole sequence, the others a window; ``layer_types`` overrides."""
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    window = keys.whole("sliding_window", default=None)
    types = keys.kinds("layer_types", layers, LAYER_TYPES) or [LAYER_TYPES[(i + 1) % every != 0] for i in range(layers)]
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_activation", "hidden_act", default="gelu-tanh"))

    def block(looks_back: int | None) -> Any:
        word = "sliding" if looks_back else ""
        part = attention(shape, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, window=looks_back)
        return sandwich(label(word), hidden, norms(hidden), part, mlp, tags={word} if word else ())

    blocks = by_kind(layers, lambda i: window if types[i] == "sliding_attention" else None, block)
    return make(keys, family, blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden, tied=True))


FAMILY = Family("gemma2", ("gemma2",), build)
