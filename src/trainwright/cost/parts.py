"""A part of a block's time: the form that every kind of kernel fills in."""

from __future__ import annotations

from dataclasses import dataclass, field

from .table import Column


@dataclass(frozen=True)
class Part:
    """Seconds of one kind of kernel of a block, forward and backward; `numbers` are the columns that the formula names."""

    name: str
    kind: str  # product | grouped | attention | scores | elementwise | casts | loss | gradients
    forward: Column
    backward: Column
    formula: str
    numbers: dict[str, Column] = field(default_factory=dict)
    source: str = "catalog/kernels.toml"
