"""Model families, one file each: a Hugging Face ``config.json`` to a `ModelSpec`.

A family file exposes ``FAMILY = Family(name, model_types, build)``. `build_model` finds the family by ``model_type``; a type that no family
knows is refused by name, never guessed. A multimodal configuration is read as its language model (``text_config``).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..errors import SpecError, unknown
from ..registry import Registry
from ..spec.model import ModelSpec


@dataclass(frozen=True)
class Family:
    """`build(config, name)` gives the blocks of any configuration whose ``model_type`` is in `model_types`."""

    name: str
    model_types: tuple[str, ...]
    build: Callable[[Mapping[str, Any], str], ModelSpec]
    aliases: tuple[str, ...] = ()


FAMILIES = Registry("trainwright.models", "FAMILY", "model family")
TEXT_PARTS = ("text_config", "llm_config", "language_config")
DEFAULT_TEXT = {"mistral3": "mistral", "llava": "llama"}


@cache
def _by_type() -> dict[str, Family]:
    return {t: family for family in FAMILIES.values() for t in family.model_types}


def _family(kind: str) -> Family | None:
    """The family of a ``model_type``: the file of that name where there is one (no need to import the others), else whichever lists it."""
    if kind.isidentifier() and importlib.util.find_spec(f"{__name__}.{kind}") is not None:
        family = getattr(importlib.import_module(f"{__name__}.{kind}"), "FAMILY", None)
        if family is not None and kind in family.model_types:
            return family
    return _by_type().get(kind)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a multimodal configuration: its own keys, with the wrapper's tied embeddings where it does not say."""
    inner = next((config[k] for k in TEXT_PARTS if isinstance(config.get(k), Mapping) and config[k]), None)
    if inner is None:
        return config
    merged = dict(inner)
    if "model_type" not in merged:
        merged["model_type"] = DEFAULT_TEXT.get(str(config.get("model_type")), config.get("model_type"))
    if "tie_word_embeddings" not in merged and "tie_word_embeddings" in config:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    return merged


def _check_values(config: Mapping[str, Any], where: str) -> None:
    """Raises `SpecError` for a number that is none, and for text where rotary embeddings have a table: keys that no count of parameters reads."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_values(value, f"{where}.{key}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{value} is no number", f"{where}.{key}")
        elif key in ("rope_scaling", "rope_parameters") and value is not None:
            raise SpecError(f"{str(value)[:40]!r} is not a table", f"{where}.{key}")


def build_model(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """A configuration's keys -> ModelSpec.

    Raises `SpecError` for an unknown ``model_type`` (with the nearest families) and for keys that are missing, of a wrong kind or do not fit.
    """
    text = text_part(config)
    kind = text.get("model_type")
    if kind is None or kind == "":
        raise SpecError("has no model_type", name or "model", sorted(_by_type()))
    if not isinstance(kind, str):
        raise SpecError(f"{str(kind)[:40]!r} is not a model_type", name or "model", sorted(_by_type()))
    family = _family(kind)
    if family is None:
        raise unknown("model_type", kind, _by_type(), name or "model")
    model = family.build(text, name)
    _check_values(text, name or "model")
    if text is not config or "vision_config" in config:
        model = replace(model, notes=("text part only: the encoders of other modalities are left out", *model.notes))
    return model
