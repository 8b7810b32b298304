"""Qwen3: no biases, a norm on each head of q and k, head size given apart (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .parts import read_heads
from .qwen2 import qwen_dense

DEFAULTS = {"vocab_size": 151936, "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    bias = keys.flag("attention_bias")
    return qwen_dense(keys, "qwen3", read_heads(keys, keys.hidden()), {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"})


FAMILY = Family("qwen3", ("qwen3", "qwen3_vl_text"), build)
