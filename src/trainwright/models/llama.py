"""Llama and those that share its block: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.blocks import Block
from ..spec.model import ModelSpec
from . import Family
from .parts import add, attention, embedding, flag, gated_mlp, head, norm, one_kind_of_layer, read


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    hidden = read(config, "hidden_size")
    heads = read(config, "num_attention_heads")
    kv_heads = read(config, "num_key_value_heads", default=heads)
    head_dim = read(config, "head_dim", default=hidden // heads)
    ffn = read(config, "intermediate_size")
    vocab = read(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", False)
    bias = flag(config, "attention_bias", False)
    layer = Block(
        "layer",
        (
            norm("input_layernorm", "x", "h1", hidden),
            *attention("h1", "a", hidden, heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias),
            add("residual_1", "x", "a", "x1", hidden),
            norm("post_attention_layernorm", "x1", "h2", hidden),
            *gated_mlp("h2", "m", hidden, ffn, str(config.get("hidden_act", "silu")), bias=flag(config, "mlp_bias", False)),
            add("residual_2", "x1", "m", "x2", hidden),
        ),
    )
    return one_kind_of_layer(
        name,
        "llama",
        config,
        layer,
        read(config, "num_hidden_layers"),
        hidden=hidden,
        vocab=vocab,
        max_positions=read(config, "max_position_embeddings", default=2048),
        tied=tied,
        embedding=embedding(vocab, hidden),
        head=head(vocab, hidden, tied),
        buffer_bytes=2 * (head_dim // 2) * 4,
    )


FAMILY = Family("llama", ("llama",), build)
