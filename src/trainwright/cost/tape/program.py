"""From one replay to matrices: a structure's moments as linear functions of its sizes and of the number of repeated layers.

A stage is a few layers, a unit that repeats m times, a few layers. The replay has `FEW` units; one more unit would add to each moment what
a unit owns and, where it has run, what it leaves. What it leaves in a phase is the difference of the same event in two neighboring units of
the middle. Events of the units in between lie between their neighbors, never above.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ..memory_table import PARTS, PHASES
from .machine import Place, padded
from .setup import Setup
from .sizes import Symbol
from .step import ENDS_AFTER, Step

FEW = 4
BLOCK = 32  # moments that are compared with each other at once
ORDER = (
    "load",
    "forward",
    "autocast",
    "backward",
    "casting",
    "reduce",
    "finish",
    "uncast",
    "optimizer",
    "square roots",
)  # segments of a step
PEOPLE = {
    "autocast": "forward",
    "casting": "backward",
    "reduce": "backward",
    "finish": "backward",
    "uncast": "backward",
    "square roots": "optimizer",
}  # their PHASES
AMONG_OTHERS, AFTER_LAST, ALONE = range(3)  # which other micro-batches of a pipeline rank are in flight at a moment: see `pipeline.Rank`
DOWN = ("backward", "casting")  # which visit layers from the last to the first
Matrix = NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """Names of layers as head + unit * repeats + tail."""

    head: tuple[str, ...]
    unit: tuple[str, ...]
    repeats: int
    tail: tuple[str, ...]

    def layers(self, repeats: int) -> tuple[str, ...]:
        return self.head + self.unit * repeats + self.tail


@lru_cache(maxsize=4096)
def pattern(names: tuple[str, ...], multiple: int = 1) -> Pattern:
    """The decomposition whose repeats cover most, with the shortest unit; head and unit are multiples of `multiple` long."""
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


@dataclass(frozen=True, eq=False)
class Program:
    """A stage's matrices: `base` and `slope` are (moments x parts x symbols), for `few` units and for each more.

    `phase` indexes PHASES, `others` says what else is in flight (`others_at`), `names` say the event; `marks[name]` is (2 x parts x symbols), base and slope.
    """

    symbols: tuple[Symbol, ...]
    base: Matrix
    slope: Matrix
    phase: NDArray[np.int64]
    others: NDArray[np.int64]
    names: tuple[str, ...]
    marks: dict[str, Matrix]
    few: int

    @cached_property
    def totals(self) -> tuple[Matrix, Matrix]:
        """(moments x symbols), all parts together: base and slope."""
        return self.base.sum(axis=1), self.slope.sum(axis=1)


def make(setup: Setup, shape: Pattern) -> Program:
    """Replay `setup` with few units (all of them where there are only few) and read off its matrices."""
    few = min(shape.repeats, FEW)
    step = Step(setup, [setup.model.blocks[name] for name in shape.layers(few)])
    step.replay()
    return read(step, shape, few, extend=shape.repeats > FEW)


def read(step: Step, shape: Pattern, few: int, extend: bool) -> Program:
    """The matrices of a replayed step; slopes are zero where nothing repeats."""
    size, parts = len(step.symbols.table), len(PARTS)
    width = size * parts
    moments = step.tape.moments
    live = np.stack([padded(m[2], width) for m in moments])
    places = [m[0] for m in moments]
    slope = np.zeros_like(live)
    marks = {k: np.stack([padded(v, width), np.zeros(width, dtype=np.int64)]) for k, v in step.tape.marks.items()}
    if extend:
        slope = _slopes(step, shape, live, places, marks)
    keep = _frontier(live, slope, places, size)

    def shaped(rows: Matrix) -> Matrix:
        return np.ascontiguousarray(rows.reshape(*rows.shape[:-1], size, parts).swapaxes(-1, -2))

    phase = np.array([PHASES.index(phase_of(places[i])) for i in keep])
    others = np.array([others_at(places[i]) for i in keep])
    names = tuple(f"{phase_of(places[i])}: {moments[i][1]}" for i in keep)
    return Program(
        tuple(step.symbols.table),
        shaped(live[keep]),
        shaped(slope[keep]),
        phase,
        others,
        names,
        {k: shaped(v) for k, v in marks.items()},
        few,
    )


def _slopes(step: Step, shape: Pattern, live: Matrix, places: list[Place], marks: dict[str, Matrix]) -> Matrix:
    """What one more unit adds to each moment: what is there when its phase begins, and what the unit leaves where the moment comes after
    it."""
    length, first = len(shape.unit), len(shape.head)
    middle = range(first + length, first + 2 * length)
    index = {place: i for i, place in enumerate(places)}
    width = live.shape[1]
    entry = np.zeros(width, dtype=np.int64)
    for i in middle:
        entry += padded(step.layer_owned[i], width)
    marks["owned"][1] = entry
    marks["saved"][1] -= sum((padded(step.layer_copies[i], width) for i in middle), np.zeros(width, dtype=np.int64))
    for i in middle:
        entry = entry + padded(step.layer_accumulated[i], width)
    slope = np.zeros_like(live)
    begin = entry
    where = np.array([_side(place, first + 2 * length) for place in places])
    phases = np.array([place[0] for place in places])
    for phase in ORDER:
        left = np.zeros(width, dtype=np.int64)
        for name, layer, event in places:
            other = index.get((phase, layer + length, event))
            if name == phase and layer in middle and other is not None:
                here = index[(name, layer, event)]
                left = live[here] - live[other] if phase in DOWN else live[other] - live[here]
                break
        rows = phases == phase
        after = (where < 0) if phase in DOWN else (where > 0)
        if phase == "square roots":  # what is laid out for one operation is gone before the next
            entry = begin
        begin = entry
        slope[rows] = entry + np.where(after[rows], 1, 0)[:, None] * left
        entry = entry + left
        if phase in ("forward", "autocast"):
            marks["saved"][1] += left
            marks["after forward"][1] = entry
        if phase in ("backward", "casting", "reduce", "finish", "uncast"):
            marks["after backward"][1] = entry
    return slope


def phase_of(place: Place) -> str:
    """The phase of a moment as people call it."""
    return PEOPLE.get(place[0], place[0])


def others_at(place: Place) -> int:
    """Whether other micro-batches are in flight at a moment: not in the optimizer; when gradients are reduced at last, what `Rank.last` says."""
    if place[0] in ("optimizer", "square roots"):
        return ALONE
    return AFTER_LAST if place[0] in ("reduce", "finish", "uncast") else AMONG_OTHERS


def _side(place: Place, split: int) -> int:
    """-1 for moments that lie before the inserted unit in the order of layers, 1 for those after it."""
    return 1 if place[1] >= split or place[1] == ENDS_AFTER else -1


def _frontier(live: Matrix, slope: Matrix, places: list[Place], size: int) -> list[int]:
    """Moments that no other of their phase with as much in flight dominates in every coefficient: first inside a layer, where slopes agree, then among all."""
    base, more = (m.reshape(len(m), size, len(PARTS)).sum(axis=2) for m in (live, slope))
    segments: dict[tuple[str, int], list[int]] = {}
    for i, place in enumerate(places):
        segments.setdefault(place[:2], []).append(i)
    left = [i for rows in segments.values() for i in _undominated(base, rows)]
    both = np.concatenate([base, more], axis=1)
    phases: dict[tuple[str, int], list[int]] = {}
    for i in left:
        phases.setdefault((phase_of(places[i]), others_at(places[i])), []).append(i)
    return sorted(i for rows in phases.values() for i in _undominated(both, rows))


def _undominated(values: Matrix, rows: list[int]) -> list[int]:
    some = values[rows]
    some = some[:, some.any(axis=0)]
    order = np.argsort(-some.sum(axis=1), kind="stable")  # no row is dominated by a later one, but for equals
    kept = np.zeros(0, dtype=np.intp)
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        block = block[~_above(some[kept], some[block]).any(axis=0)]
        kept = np.concatenate([kept, block[~np.triu(_above(some[block], some[block]), 1).any(axis=0)]])
    return [rows[i] for i in kept.tolist()]


def _above(a: Matrix, b: Matrix) -> NDArray[np.bool_]:
    """[rows of a, rows of b] whether a row of `a` is nowhere below one of `b`."""
    return np.asarray((a[:, None] >= b[None]).all(axis=2))
