"""Falcon: attention and MLP side by side, multi-query (7B) or grouped (40B, 180B), no biases, plain GELU MLP (arXiv:2311.16867)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import MOST_HEADS, Keys
from .layers import ends, make, parallel, pre_norm, rope_buffers
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 65024, "num_attention_heads": 71}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden = keys.hidden("hidden_size", "n_embed")
    layers = keys.layers("num_hidden_layers", "n_layer")
    new, multi_query, bias = keys.flag("new_decoder_architecture"), keys.flag("multi_query", True), keys.flag("bias")
    heads = keys.whole("num_attention_heads", "n_head", most=MOST_HEADS)
    # ``num_kv_heads`` counts only in the new form; the first one is multi-query or has as many as heads.
    kv_heads = keys.whole("num_kv_heads", "n_head_kv", default=heads, most=MOST_HEADS) if new else 1 if multi_query else heads
    shape = read_heads(
        Keys({**config, "num_attention_heads": heads, "num_kv_heads": kv_heads}, name), hidden, "num_attention_heads", "num_kv_heads"
    )
    names = ("query", "key", "value", "dense")
    part = attention(shape, qkv_bias=bias, out_bias=bias, rope=not keys.flag("alibi"), prefix="self_attention.", names=names)
    ffn = keys.ffn("ffn_hidden_size", default=4 * hidden)
    mlp = plain_mlp(hidden, ffn, keys.function("activation", default="gelu"), bias=bias, names=("dense_h_to_4h", "dense_4h_to_h"))
    normed = norms(hidden, "layer", bias=True)
    if not keys.flag("parallel_attn", True):
        layer = pre_norm("layer", hidden, normed, part, mlp)
    else:
        two = keys.whole("num_ln_in_parallel_attn", default=2 if new else 1, most=2) == 2
        layer = parallel("layer", hidden, normed, part, mlp, names=("ln_attn", "ln_mlp") if two else ("input_layernorm",))
    both = ends(keys, hidden, tied=True, kind="layer", norm_bias=True, norm_name="ln_f", embed="word_embeddings")
    return make(keys, "falcon", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **both)


FAMILY = Family("falcon", ("falcon",), build)
