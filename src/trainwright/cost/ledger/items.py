"""Named columns of bytes. A moment of a step is a list of them; the peak is the largest sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..memory_table import PARTS
from ..table import Column

POOLS = ("work", "flat", "gather", "reduce")


@dataclass(frozen=True)
class Item:
    """`bytes` (whole numbers in float64) of one part of the breakdown; `formula` in words, `source` of the rule.

    `pool`: which blocks of the caching allocator serve it. "work" (activations, logits, gradients of 16 bits) share blocks; what is
    allocated
    as one large piece (`flat`), or on a stream of its own (`gather`, `reduce`), finds no block that another pool has freed.
    """

    name: str
    part: str
    bytes: Column
    formula: str = ""
    source: str = ""
    pool: str = ""

    def scaled(self, share: float) -> Item:
        return replace(self, bytes=np.rint(self.bytes * share))

    def masked(self, where: Column) -> Item:
        return replace(self, bytes=self.bytes * where)


def item(name: str, part: str, size: Column | float, formula: str = "", source: str = "", pool: str = "work") -> Item:
    return Item(name, part, np.rint(np.asarray(size, dtype=np.float64)), formula, source, pool)


@dataclass(frozen=True)
class Happening:
    """A moment of a step: `phase` is one of `memory_table.PHASES`."""

    name: str
    phase: str
    items: tuple[Item, ...]

    def total(self) -> Column:
        return sum_of(self.items)

    def pools(self, n: int) -> dict[str, Column]:
        return {pool: sum_of([i for i in self.items if i.pool == pool], n) for pool in POOLS}

    def parts(self, n: int) -> dict[str, Column]:
        return {part: sum_of([i for i in self.items if i.part == part], n) for part in PARTS}


def sum_of(items: tuple[Item, ...] | list[Item], n: int = 1) -> Column:
    """The sum of the items' columns; `n` zeros where there are none."""
    total: Column = np.zeros(n)
    for i in items:
        total = total + i.bytes
    return total


@dataclass(frozen=True)
class Accounts:
    """What a framework holds, beside activations. `gradients` are owned between backward and step; `always` lives through the whole step.

    `early`: the share of the gradients that exists before backward ends (a persistent buffer or an accumulating second micro-batch: 1).
    `loss`, `block`, `last`, `step` are held for a moment: at the loss, at the start of a block's backward, at the end of backward, in the
    optimizer; `forward` beside `loss` until forward ends.
    """

    parameters: tuple[Item, ...]
    masters: tuple[Item, ...]
    gradients: tuple[Item, ...]
    optimizer: tuple[Item, ...]
    always: tuple[Item, ...] = ()
    early: Column | float = 0.0
    forward: tuple[Item, ...] = ()
    loss: tuple[Item, ...] = ()
    block: tuple[Item, ...] = ()
    last: tuple[Item, ...] = ()
    step: tuple[Item, ...] = ()
    leftovers: tuple[Item, ...] = ()  # blocks that were freed before the first step and that nothing later fits
