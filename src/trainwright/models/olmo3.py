"""OLMo 3: OLMo 2's layers, three of four with a sliding window (Ai2, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .olmo2 import olmo_post_norm

DEFAULTS = {"vocab_size": 50304, "intermediate_size": 11008, "num_attention_heads": 32, "sliding_window": 4096}
LAYER_TYPES = ("full_attention", "sliding_attention")


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    layers, window = keys.layers(), keys.whole("sliding_window", default=None)
    types = keys.kinds("layer_types", layers, LAYER_TYPES) or [LAYER_TYPES[(i + 1) % 4 != 0] for i in range(layers)]
    return olmo_post_norm(keys, "olmo3", [window if kind == "sliding_attention" else None for kind in types])


FAMILY = Family("olmo3", ("olmo3",), build)
