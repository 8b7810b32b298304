"""Qwen2 and Qwen2.5: Llama's block with biases on q, k, v (arXiv:2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import Heads, attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 151936, "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 32}
LAYER_TYPES = ("full_attention", "sliding_attention")


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    return qwen_dense(keys, "qwen2", read_heads(keys, keys.hidden()), {"qkv_bias": True})


def qwen_windows(keys: Keys, layers: int) -> list[int | None]:
    """The window of each layer: ``layer_types``, or from ``max_window_layers`` on where ``use_sliding_window`` is set."""
    window = keys.whole("sliding_window", default=4096) if keys.flag("use_sliding_window") else None
    first = keys.whole("max_window_layers", default=28, least=0)
    types = keys.kinds("layer_types", layers, LAYER_TYPES)
    return [window if (types[i] == "sliding_attention" if types else i >= first) else None for i in range(layers)]


def qwen_dense(keys: Keys, family: str, shape: Heads, options: Mapping[str, Any]) -> ModelSpec:
    """The dense decoder of Qwen2 and Qwen3; `options` are those of `attention`."""
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))
    windows = qwen_windows(keys, layers)

    def block(window: int | None) -> Any:
        tags = {"sliding"} if window else ()
        part = attention(shape, window=window, **options)
        return pre_norm(label("sliding" if window else ""), hidden, norms(hidden), part, mlp, tags=tags)

    blocks = by_kind(layers, lambda i: windows[i], block)
    return make(keys, family, blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("qwen2", ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"), build)
