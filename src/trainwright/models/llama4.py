"""Llama 4, the language model: experts with a shared one in every ``interleave_moe_layer_step``-th layer.

Three of four layers attend inside chunks and have rotary positions, the fourth sees everything and has none (Meta, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import attention, experts, gated_mlp, norms, read_experts, read_heads
from .smollm3 import rotary_layers

DEFAULTS = {
    "vocab_size": 202048, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "num_experts_per_tok": 1, "num_local_experts": 16, "attention_chunk_size": 8192,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn, dense_ffn = keys.hidden(), keys.layers(), keys.ffn(), keys.ffn("intermediate_size_mlp")
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    function, step = keys.function("hidden_act", default="silu"), keys.whole("interleave_moe_layer_step", default=1)
    listed = keys.wholes("moe_layers")
    sparse = set(range(step - 1, layers, step) if listed is None else listed)
    # A layer with rotary positions sees its chunk only. A chunk is taken for a window of its width: right for sequences up to one chunk,
    # an upper bound of twice the work beyond.
    chunk, ropes = keys.whole("attention_chunk_size", default=None), rotary_layers(keys, layers)
    count, top_k = read_experts(keys, "num_local_experts", "num_experts")
    shared = gated_mlp(hidden, ffn, function, prefix="feed_forward.shared_expert.")
    moe = experts(hidden, ffn, count, top_k, function=function, router="router", prefix="feed_forward.", shared=shared)
    dense = gated_mlp(hidden, dense_ffn, function, prefix="feed_forward.")
    # QK norm is an RMS norm without weights, on the layers with rotary positions; it comes after the rotation there and changes no count.

    def block(kind: tuple[bool, bool]) -> Any:
        is_moe, rope = kind
        words = ("" if rope else "nope", "moe" if is_moe else "dense")
        part = attention(shape, qkv_bias=bias, out_bias=bias, rope=rope, window=chunk if rope else None)
        tags = {"moe" if is_moe else "dense", *({"sliding"} if rope and chunk else ())}
        return pre_norm(label(*words), hidden, norms(hidden), part, moe if is_moe else dense, tags=tags)

    blocks = by_kind(layers, lambda i: (i in sparse, ropes[i]), block)
    return make(keys, "llama4", blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("llama4", ("llama4_text", "llama4"), build)
