"""OLMo 2: norms after attention and MLP instead of before, and one norm over all of q and of k (arXiv:2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, post_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 50304, "intermediate_size": 11008, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    return olmo_post_norm(keys, "olmo2", [None] * keys.layers())


def olmo_post_norm(keys: Keys, family: str, windows: list[int | None]) -> ModelSpec:
    """The decoder of OLMo 2 and 3; `windows` has the sliding window of each layer, None = the whole sequence."""
    hidden, ffn = keys.hidden(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))

    def block(window: int | None) -> Any:
        word = "sliding" if window else ""
        part = attention(shape, qkv_bias=bias, out_bias=bias, qk_norm="all", window=window)
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        return post_norm(label(word), hidden, norms(hidden), part, mlp, names=names, tags={word} if word else ())

    blocks = by_kind(len(windows), lambda i: windows[i], block)
    return make(keys, family, blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("olmo2", ("olmo2",), build)
