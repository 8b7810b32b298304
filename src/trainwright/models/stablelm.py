"""StableLM: LayerNorm with bias, gated SiLU MLP, rotary positions on a quarter of each head (arXiv:2402.17834)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import ends, make, parallel, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 50304, "intermediate_size": 6912, "num_attention_heads": 32, "num_key_value_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape = read_heads(keys, hidden)
    part = attention(
        shape,
        qkv_bias=keys.flag("use_qkv_bias"),
        qk_norm="each" if keys.flag("qk_layernorm") else "",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_function="layer",
    )
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"))
    form: Any = parallel if keys.flag("use_parallel_residual") else pre_norm
    layer = form("layer", hidden, norms(hidden, "layer", bias=True), part, mlp)
    both = ends(keys, hidden, kind="layer", norm_bias=True)
    return make(keys, "stablelm", [layer] * layers, buffer_bytes=rope_buffers(shape.head_dim // 4), **both)


FAMILY = Family("stablelm", ("stablelm",), build)
