"""MPT: ALiBi positions, LayerNorm without bias, no biases at all, tied embeddings (MosaicML, 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import embedding, head, make, pre_norm
from .parts import attention, norms, plain_mlp, read_heads

DEFAULTS = {"vocab_size": 50368, "n_heads": 16, "max_seq_len": 2048}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, vocab = keys.hidden("d_model", "hidden_size"), keys.layers("n_layers", "num_hidden_layers"), keys.vocab()
    shape, tied = read_heads(keys, hidden, "n_heads"), keys.tied(True)
    ratio = keys.whole("expansion_ratio", default=4, most=64)
    bias = not keys.flag("no_bias", True)
    inner = config.get("attn_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise SpecError("is not a table", keys.where("attn_config"))
    # ALiBi takes the place of learned positions; without it the table of positions is there unless ``learned_pos_emb`` is false.
    alibi = Keys(inner or {}, keys.where("attn_config")).flag("alibi", True)
    positions = keys.whole("max_seq_len", most=2**27)
    learned = positions if not alibi and keys.flag("learned_pos_emb", True) else 0
    names = ("query", "key", "value", "out_proj")
    part = attention(shape, qkv_bias=bias, out_bias=bias, rope=False, prefix="attn.", names=names)
    mlp = plain_mlp(hidden, ratio * hidden, "gelu", bias=bias, prefix="ffn.")
    layer = pre_norm("layer", hidden, norms(hidden, "layer", bias=bias), part, mlp, names=("norm_1", "norm_2"))
    return make(
        keys,
        "mpt",
        [layer] * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=positions,
        tied=tied,
        embedding=embedding(vocab, hidden, positions=learned, name="wte", position_name="wpe"),
        head=head(vocab, hidden, tied, kind="layer", norm_bias=bias, norm_name="norm_f"),
    )


FAMILY = Family("mpt", ("mpt",), build)
