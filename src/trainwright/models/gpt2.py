"""GPT-2 and GPT-3: LayerNorm with bias, learned positions, biased projections, plain GELU MLP of 4h (Radford et al. 2019, arXiv:2005.14165).

Weights are listed as three projections q, k, v; a fused ``c_attn`` of the same size holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.blocks import Block
from ..spec.model import ModelSpec
from . import Family
from .parts import add, attention, embedding, flag, head, norm, one_kind_of_layer, plain_mlp, read


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    hidden = read(config, "n_embd", "hidden_size")
    heads = read(config, "n_head", "num_attention_heads")
    ffn = read(config, "n_inner", "intermediate_size", default=4 * hidden)
    vocab = read(config, "vocab_size", default=50257)
    positions = read(config, "n_positions", "n_ctx", "max_position_embeddings", default=1024)
    tied = flag(config, "tie_word_embeddings", True)
    head_dim = read(config, "head_dim", default=max(1, hidden // heads))
    layer = Block(
        "layer",
        (
            norm("ln_1", "x", "h1", hidden, "layer", bias=True),
            *attention("h1", "a", hidden, heads, heads, head_dim, qkv_bias=True, out_bias=True, rope=False, prefix="attn."),
            add("residual_1", "x", "a", "x1", hidden),
            norm("ln_2", "x1", "h2", hidden, "layer", bias=True),
            *plain_mlp("h2", "m", hidden, ffn, "gelu"),
            add("residual_2", "x1", "m", "x2", hidden),
        ),
    )
    return one_kind_of_layer(
        name,
        "gpt2",
        config,
        layer,
        read(config, "n_layer", "num_hidden_layers"),
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
        tied=tied,
        embedding=embedding(vocab, hidden, positions=positions, name="wte", position_name="wpe"),
        head=head(vocab, hidden, tied, kind="layer", norm_bias=True, norm_name="ln_f"),
    )


FAMILY = Family("gpt2", ("gpt2",), build)
