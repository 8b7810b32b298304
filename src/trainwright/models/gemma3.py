"""Gemma 3, the language model: Gemma 2's layers with norms on q and k, five sliding layers to a full one (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .gemma2 import gemma_sandwich
from .keys import Keys

DEFAULTS = {
    "vocab_size": 262208,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    every = keys.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return gemma_sandwich(keys, "gemma3", every=every, qk_norm="head")


FAMILY = Family("gemma3", ("gemma3_text", "gemma3"), build)
