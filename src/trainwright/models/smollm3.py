"""SmolLM3: Llama's block, every fourth layer without rotary positions (Hugging Face, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import attention, gated_mlp, norms, read_heads

DEFAULTS = {"vocab_size": 128256, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers, ffn = keys.hidden(), keys.layers(), keys.ffn()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    ropes = rotary_layers(keys, layers)
    window = keys.whole("sliding_window", default=None) if keys.flag("use_sliding_window") else None
    mlp = gated_mlp(hidden, ffn, keys.function("hidden_act", default="silu"), bias=keys.flag("mlp_bias"))

    def block(rope: bool) -> Any:
        words = ("" if rope or not window else "sliding", "" if rope else "nope")
        part = attention(shape, qkv_bias=bias, out_bias=bias, rope=rope, window=None if rope else window)
        return pre_norm(label(*words), hidden, norms(hidden), part, mlp, tags={w for w in words if w})

    blocks = by_kind(layers, lambda i: ropes[i], block)
    return make(keys, "smollm3", blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden, tied=True))


def rotary_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have rotary positions: ``no_rope_layers`` (1 = it has them), else all but every ``no_rope_layer_interval``-th."""
    every = keys.whole("no_rope_layer_interval", default=4)
    given = keys.wholes("no_rope_layers")
    if given and len(given) != layers:
        raise SpecError(f"has {len(given)} entries for {layers} layers", keys.where("no_rope_layers"))
    return [bool(v) for v in given] if given else [(i + 1) % every != 0 for i in range(layers)]


FAMILY = Family("smollm3", ("smollm3",), build)
