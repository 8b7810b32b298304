"""Granite 3: Llama's block with four scalar multipliers, which are no parameters (IBM, Granite 3.0 report)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .llama import llama_like

DEFAULTS = {"vocab_size": 32000, "intermediate_size": 11008, "num_attention_heads": 32}


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return llama_like(Keys(config, name, DEFAULTS), "granite")


FAMILY = Family("granite", ("granite",), build)
