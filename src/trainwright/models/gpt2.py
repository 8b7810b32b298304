"""GPT-2 and GPT-3: LayerNorm with bias, learned positions, biased projections, plain GELU MLP of 4h (GPT-2 report; arXiv:2005.14165).

Weights are listed as three projections q, k, v; a fused ``c_attn`` of the same size holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import embedding, head, make, pre_norm
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 50257, "n_positions": 1024}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, vocab = keys.hidden("n_embd", "hidden_size"), keys.layers("n_layer", "num_hidden_layers"), keys.vocab()
    shape = read_heads(keys, hidden, "n_head")
    ffn = keys.ffn("n_inner", "intermediate_size", default=4 * hidden)
    positions = keys.whole("n_positions", "n_ctx", "max_position_embeddings", most=2**27)
    tied = keys.tied(True)
    layer = pre_norm(
        "layer",
        hidden,
        norms(hidden, "layer", bias=True),
        attention(shape, qkv_bias=True, out_bias=True, rope=False, prefix="attn."),
        plain_mlp(hidden, ffn, keys.function("activation_function", default="gelu-tanh")),
        names=("ln_1", "ln_2"),
    )
    return make(
        keys,
        "gpt2",
        [layer] * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
        tied=tied,
        embedding=embedding(vocab, hidden, positions=positions, name="wte", position_name="wpe"),
        head=head(vocab, hidden, tied, kind="layer", norm_bias=True, norm_name="ln_f"),
    )


FAMILY = Family("gpt2", ("gpt2",), build)
