"""BLOOM: ALiBi positions, a LayerNorm after the embedding, biases everywhere, tied embeddings (arXiv:2211.05100)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.blocks import Block
from ..spec.model import ModelSpec
from . import Family
from .keys import UNBOUNDED, Keys
from .layers import embedding, head, make, pre_norm
from .parts import attention, norm, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 250880, "n_head": 8}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden = keys.hidden("hidden_size", "n_embed")
    layers, vocab = keys.layers("n_layer", "num_hidden_layers"), keys.vocab()
    shape, tied = read_heads(keys, hidden, "n_head"), keys.tied(True)
    part = attention(shape, qkv_bias=True, out_bias=True, rope=False, prefix="self_attention.", names=("query", "key", "value", "dense"))
    mlp = plain_mlp(hidden, 4 * hidden, "gelu-tanh", names=("dense_h_to_4h", "dense_4h_to_h"))
    layer = pre_norm("layer", hidden, norms(hidden, "layer", bias=True), part, mlp)
    table = embedding(vocab, hidden, name="word_embeddings")
    after = norm("word_embeddings_layernorm", "x", "x_n", hidden, "layer", bias=True)
    return make(
        keys,
        "bloom",
        [layer] * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=keys.whole("seq_length", default=UNBOUNDED),
        tied=tied,
        embedding=Block("embedding", (*table.ops, after)),
        head=head(vocab, hidden, tied, kind="layer", norm_bias=True, norm_name="ln_f"),
    )


FAMILY = Family("bloom", ("bloom",), build)
