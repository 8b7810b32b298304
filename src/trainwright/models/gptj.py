"""GPT-J: attention and MLP side by side after one LayerNorm, biases in the MLP and the head only (EleutherAI, 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import embedding, head, make, parallel
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 50400, "n_head": 16}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, vocab = keys.hidden("n_embd", "hidden_size"), keys.layers("n_layer", "num_hidden_layers"), keys.vocab()
    shape, tied = read_heads(keys, hidden, "n_head"), keys.tied()
    part = attention(shape, prefix="attn.", names=("q_proj", "k_proj", "v_proj", "out_proj"))
    function = keys.function("activation_function", default="gelu-tanh")
    mlp = plain_mlp(hidden, keys.ffn("n_inner", "intermediate_size", default=4 * hidden), function, names=("fc_in", "fc_out"))
    layer = parallel("layer", hidden, norms(hidden, "layer", bias=True), part, mlp, names=("ln_1",))
    return make(
        keys,
        "gptj",
        [layer] * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=keys.positions("n_positions", "n_ctx", "max_position_embeddings"),
        tied=tied,
        embedding=embedding(vocab, hidden, name="wte"),
        head=head(vocab, hidden, tied, kind="layer", norm_bias=True, bias=True, norm_name="ln_f"),
    )


FAMILY = Family("gptj", ("gptj",), build)
