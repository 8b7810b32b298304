"""The form that a strategy's file fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["parameters", "gradients", "optimizer", "activations", "sequence", "heads", "experts", "layers", "vocabulary"]
Event = Literal[
    "before_forward",
    "after_forward",
    "before_backward",
    "after_backward",
    "after_step",
    "in_layer_forward",
    "in_layer_backward",
    "between_stages",
]


@dataclass(frozen=True)
class Traffic:
    """A collective that runs at an event over an axis; `units` is its payload in units of `of` (a whole copy of the parameters, one activation, ...)."""

    event: Event
    collective: str
    axis: str
    of: str
    units: float = 1.0


@dataclass(frozen=True)
class Sharding:
    """`splits[what]` names the mesh axis that divides it; what is not named is whole on every rank.

    `stage` orders the ZeRO family (0 to 3), None for the others.
    """

    name: str
    title: str
    splits: dict[What, str]
    traffic: tuple[Traffic, ...]
    stage: int | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
