"""OPT: GPT-3's layers with ReLU and learned positions offset by two.

The 350M norms after each part instead of before and embeds at half width. Source: arXiv:2205.01068.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec.blocks import Block
from ..spec.model import ModelSpec
from . import Family
from .keys import MOST_HIDDEN, Keys
from .layers import after_norm, embedding, logits, make, pre_norm
from .parts import attention, linear, norm, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 50272, "ffn_dim": 3072, "num_attention_heads": 12, "max_position_embeddings": 2048}
OFFSET = 2  # rows at the start of the position table that padding takes


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn, vocab = keys.hidden(), keys.layers(), keys.ffn("ffn_dim"), keys.vocab()
    shape, bias, before = read_heads(keys, hidden), keys.flag("enable_bias", True), keys.flag("do_layer_norm_before", True)
    positions = keys.whole("max_position_embeddings", most=2**27)
    width = keys.whole("word_embed_proj_dim", default=hidden, most=MOST_HIDDEN)
    affine = keys.flag("layer_norm_elementwise_affine", True)
    normed = norms(hidden, "layer" if affine else "layer-no-weight", bias=affine)
    part = attention(shape, qkv_bias=bias, out_bias=bias, rope=False, names=("q_proj", "k_proj", "v_proj", "out_proj"))
    mlp = plain_mlp(hidden, ffn, keys.function("activation_function", default="relu"), bias=bias, prefix="", names=("fc1", "fc2"))
    form = pre_norm if before else after_norm
    layer = form("layer", hidden, normed, part, mlp, names=("self_attn_layer_norm", "final_layer_norm"))
    final = before and not keys.flag("_remove_final_layer_norm")
    return make(
        keys,
        "opt",
        [layer] * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
        tied=(tied := keys.tied(True)),
        embedding=_embedding(vocab, width, hidden, positions),
        head=_head(vocab, width, hidden, tied, final, affine),
    )


def _embedding(vocab: int, width: int, hidden: int, positions: int) -> Block:
    """Tokens at `width`, projected to `hidden` where they differ, plus positions."""
    table = embedding(vocab, hidden, positions=positions + OFFSET)
    if width == hidden:
        return table
    tokens = embedding(vocab, width).ops[0]
    return Block(
        "embedding", (replace(tokens, output="e"), linear("project_in", "e", "x", width, hidden, parallel="replicated"), *table.ops[1:])
    )


def _head(vocab: int, width: int, hidden: int, tied: bool, final: bool, affine: bool) -> Block:
    source, rows = "x", []
    if final:
        rows.append(norm("final_layer_norm", "x", "final", hidden, "layer" if affine else "layer-no-weight", bias=affine))
        source = "final"
    if width != hidden:
        rows.append(linear("project_out", source, "narrow", hidden, width, parallel="replicated"))
        source = "narrow"
    return Block("head", (*rows, *logits(source, vocab, width, tied)))


FAMILY = Family("opt", ("opt",), build)
