"""Llama and those that share its block: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP.

Sources: arXiv:2302.13971, arXiv:2407.21783.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 32000, "intermediate_size": 11008, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return llama_like(Keys(config, name, DEFAULTS), "llama")


def llama_like(keys: Keys, family: str, *, tied: bool = False) -> ModelSpec:
    """Llama's decoder, the same block in every layer; ``attention_bias`` and ``mlp_bias`` as in its configuration."""
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape = read_heads(keys, hidden)
    bias = keys.flag("attention_bias")
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"), bias=keys.flag("mlp_bias"))
    layer = pre_norm("layer", hidden, norms(hidden), attention(shape, qkv_bias=bias, out_bias=bias), mlp)
    return make(keys, family, [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden, tied=tied))


FAMILY = Family("llama", ("llama",), build)
