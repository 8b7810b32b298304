"""From replays to matrices: a structure's moments as linear functions of its sizes and of the number of repeated layers.

A stage is a few layers, a unit that repeats m times, a few layers. Replays of 5 and 6 units agree event by event once the middle unit is
dropped (the first two and the last three are kept), so each moment is base + (m - 5) * slope. Events of the dropped units lie between their
neighbors, never above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ..memory_table import PARTS, PHASES
from .machine import Place
from .setup import Setup, Stage
from .sizes import Symbol
from .step import Step

FEW, FIRST = 5, 2
Matrix = NDArray[np.int64]
Event = tuple[Place, str, dict[int, int]]


@dataclass(frozen=True)
class Pattern:
    """Names of layers as head + unit * repeats + tail."""

    head: tuple[str, ...]
    unit: tuple[str, ...]
    repeats: int
    tail: tuple[str, ...]

    def layers(self, repeats: int) -> tuple[str, ...]:
        return self.head + self.unit * repeats + self.tail


def pattern(names: Sequence[str], multiple: int = 1) -> Pattern:
    """The decomposition whose repeats cover most, with the shortest unit; head and unit are multiples of `multiple` long."""
    names = tuple(names)
    best = Pattern(names, (), 0, ())
    covered = 0
    for period in range(1, 9):
        unit_length = lcm(period, multiple)
        for start in range(0, min(len(names), 8 * multiple), multiple):
            unit = names[start : start + unit_length]
            if len(unit) < unit_length:
                break
            n = 1
            while names[start + n * unit_length : start + (n + 1) * unit_length] == unit:
                n += 1
            if n * unit_length > covered + period:
                covered, best = n * unit_length, Pattern(names[:start], unit, n, names[start + n * unit_length :])
    return best


@dataclass(frozen=True)
class Moments:
    """`base` and `slope` are (moments x parts x symbols); `phase` indexes PHASES; `names` say the event."""

    base: Matrix
    slope: Matrix
    phase: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A structure's matrices. `marks[name]` is (2 x parts x symbols): base and slope."""

    symbols: tuple[Symbol, ...]
    moments: Moments
    marks: dict[str, Matrix]
    few: int

    def at(self, repeats: int) -> Matrix:
        """(moments x symbols): all parts together, for that many repeats."""
        return self._totals[0] + (repeats - self.few) * self._totals[1]

    @cached_property
    def _totals(self) -> tuple[Matrix, Matrix]:
        return self.moments.base.sum(axis=1), self.moments.slope.sum(axis=1)

    def parts(self, moment: int, repeats: int) -> Matrix:
        """(parts x symbols) of a moment."""
        return self.moments.base[moment] + (repeats - self.few) * self.moments.slope[moment]

    def mark(self, name: str, repeats: int) -> Matrix:
        base, slope = self.marks[name]
        return base + (repeats - self.few) * slope


def make(setup: Setup, shape: Pattern) -> Program:
    """Replay `setup` with few layers, or with all of them where there are only few."""
    if shape.repeats <= FEW:
        return _join(_replay(setup, shape, shape.repeats), None, shape, shape.repeats)
    return _join(_replay(setup, shape, FEW), _replay(setup, shape, FEW + 1), shape, FEW)


def _replay(setup: Setup, shape: Pattern, repeats: int) -> Step:
    names = shape.layers(repeats)
    step = Step(setup, [setup.model.blocks[name] for name in names])
    step.replay()
    return step


def _join(a: Step, b: Step | None, shape: Pattern, few: int) -> Program:
    symbols = tuple(a.symbols.table)
    size = len(symbols)
    if b is None:
        chosen = a.tape.moments
        base = np.stack([_dense(live, size) for _, _, live in chosen])
        slope = np.zeros_like(base)
        marks = {k: np.stack([m := _dense(v, size), np.zeros_like(m)]) for k, v in a.tape.marks.items()}
    else:
        if [s.formula for s in b.symbols.table] != [s.formula for s in symbols]:
            raise RuntimeError("a replay with one more unit has other sizes")
        first, second = _aligned(a, shape, few), _aligned(b, shape, few + 1)
        if first.keys() != second.keys():
            raise RuntimeError("a replay with one more unit has other events")
        chosen = list(first.values())
        base = np.stack([_dense(live, size) for _, _, live in chosen])
        slope = np.stack([_dense(live, size) for _, _, live in second.values()]) - base
        marks = {k: np.stack([m := _dense(v, size), _dense(b.tape.marks[k], size) - m]) for k, v in a.tape.marks.items()}
    phase = np.array([PHASES.index(place[0]) for place, _, _ in chosen])
    names = tuple(f"{place[0]}: {what}" for place, what, _ in chosen)
    keep = _frontier(base.sum(axis=1), slope.sum(axis=1), phase)
    moments = Moments(base[keep], slope[keep], phase[keep], tuple(names[i] for i in keep))
    return Program(symbols, moments, marks, few)


def _aligned(step: Step, shape: Pattern, repeats: int) -> dict[Place, Event]:
    """Moments by place, with layers counted from the start up to the second unit and from the end after it; the units between are left
    out."""
    total = len(shape.layers(repeats))
    start = len(shape.head) + FIRST * len(shape.unit)
    end = len(shape.tail) + (FEW - FIRST) * len(shape.unit)
    found: dict[Place, Event] = {}
    for place, what, live in step.tape.moments:
        phase, layer, event = place
        if 0 <= layer < total:
            if start <= layer < total - end:
                continue
            layer = layer if layer < start else layer - total - 10
        found[(phase, layer, event)] = (place, what, live)
    return found


def _dense(live: dict[int, int], symbols: int) -> Matrix:
    out = np.zeros((symbols, len(PARTS)), dtype=np.int64)
    for key, count in live.items():
        out[key // len(PARTS), key % len(PARTS)] = count
    return out.T


def _frontier(base: Matrix, slope: Matrix, phase: NDArray[np.int64]) -> list[int]:
    """Moments that no other of their phase dominates in every coefficient of base and slope."""
    rows = np.concatenate([base, slope], axis=1)
    keep: list[int] = []
    for p in np.unique(phase):
        index = np.flatnonzero(phase == p)
        order = index[np.argsort(-rows[index].sum(axis=1), kind="stable")]
        front: list[int] = []
        for i in order:
            if not front or not np.all(rows[front] >= rows[i], axis=1).any():
                front.append(int(i))
        keep += sorted(front)
    return keep


__all__ = ["Moments", "Pattern", "Program", "Stage", "make", "pattern"]
