"""What a card holds through one step, drawn as stacked columns: moments from left to right in the order of the step, bytes upward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from ..cost.memory_table import PARTS, PHASES, Moment
from ..units import format_bytes
from .text import COLORS, FILLS

HEIGHT = 12
LABEL = 10  # columns of the scale on the left
LEAST = max(len(name) for name in PHASES) + 2  # columns of a phase


def condensed(moments: Sequence[Moment], columns: int) -> list[Moment]:
    """At most about `columns` moments, the largest of each stretch; a phase takes as many as it has a share of the moments, `LEAST` at the least."""
    phases = [name for name in PHASES if any(m.phase == name for m in moments)]
    free, found = max(columns - LEAST * len(phases), 0), []
    for name in phases:
        some = [m for m in moments if m.phase == name]
        wide = LEAST + free * len(some) // len(moments)
        found += [max((some[int(i)] for i in stretch), key=lambda m: m.bytes) for stretch in _stretches(len(some), wide)]
    return found


def _stretches(count: int, wide: int) -> list[np.ndarray]:
    """Which of `count` moments each of `wide` columns shows: a moment has several columns where there are fewer moments."""
    if count >= wide:
        return list(np.array_split(np.arange(count), wide))
    return [np.array([i * count // wide]) for i in range(wide)]


def draw(console: Console, moments: Sequence[Moment]) -> None:
    """The picture, the phases below it, and where the peak is."""
    columns = condensed(moments, max(40, min(console.width, 110)) - LABEL - 2)
    most = max(m.bytes for m in columns)
    if not most:
        return
    heights = np.cumsum([[m.parts.get(part, 0) for part in PARTS] for m in columns], axis=1) * HEIGHT / most  # [columns, parts]
    for row in reversed(range(HEIGHT)):
        label = format_bytes(most * (row + 1) / HEIGHT) if row % 4 == 3 else ""
        line = Text(f"{label:>{LABEL}} ")
        for tops in heights:
            part = int(np.searchsorted(tops, row + 0.5))  # whose bytes are there
            full = part < len(PARTS)
            line.append(FILLS[part % len(FILLS)] if full else " ", style=COLORS[part % len(COLORS)] if full else "")
        console.print(line, no_wrap=True, crop=True)
    axis = Text(" " * (LABEL + 1))
    for name in dict.fromkeys(m.phase for m in columns):
        wide = sum(m.phase == name for m in columns)
        axis.append(f"|{name:<{wide - 1}}", style="dim")
    console.print(axis, no_wrap=True, crop=True)
    peak = max(range(len(columns)), key=lambda i: columns[i].bytes)
    at = LABEL + 1 + peak
    late = peak > len(columns) // 2  # the name stands where there is room for it
    console.print(Text(f"{columns[peak].name} ^".rjust(at + 1) if late else " " * at + f"^ {columns[peak].name}"), no_wrap=True, crop=True)
    legend = [(PARTS.index(p), p) for p in PARTS if any(m.parts.get(p, 0) > 1e-6 * most for m in columns)]
    console.print(Text("  ").join(Text(f"{FILLS[i]} {name.replace('_', ' ')}", style=COLORS[i]) for i, name in legend))
