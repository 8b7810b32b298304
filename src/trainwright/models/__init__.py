"""Model families, one file each: a Hugging Face ``config.json`` to a `ModelSpec`.

A family file exposes ``FAMILY = Family(name, model_types, build)``. `build_model` finds the family by ``model_type``; a type that no family
knows is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@cache
def _by_type() -> dict[str, Family]:
    return {t: family for family in FAMILIES.values() for t in family.model_types}


def build_model(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """A configuration's keys -> ModelSpec.

    Raises `SpecError` for an unknown ``model_type`` (with the nearest families) and for keys that are missing, of the wrong kind or do not fit.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise SpecError("has no model_type", name or "model", sorted(_by_type()))
    if kind not in _by_type():
        raise unknown("model_type", kind, _by_type(), name or "model")
    return _by_type()[kind].build(config, name)
