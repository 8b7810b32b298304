"""The picture of a replayed schedule in a terminal: a line a rank, blocks of F, B, I and W with their microbatch, in as many columns as there are."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from ..schedules.actions import KINDS
from ..schedules.timeline import Timeline
from .timeline import busy_shares, ticks

FILL = {"F": "░", "B": "▓", "I": "▒", "W": "█"}
STYLE = {"F": "black on bright_blue", "B": "black on yellow", "I": "black on bright_yellow", "W": "black on green"}
MAX_RANKS = 64


def to_text(t: Timeline, width: int = 100, longest: float = 0.0) -> Text:
    """A rich `Text` of at most `width` columns: colored where the terminal can, told apart by letter and shading where it cannot.

    `longest` is the time that the whole width stands for (0: the makespan), so that several schedules share a scale.
    """
    ranks = list(range(t.stages)) if t.stages <= MAX_RANKS else [round(k * (t.stages - 1) / (MAX_RANKS - 1)) for k in range(MAX_RANKS)]
    label = len(f"rank {ranks[-1]}") + 1
    columns = max(int(width) - label - 1, 8)
    if longest:
        columns = max(round(columns * t.makespan / longest), 1)
    per_column = t.makespan / columns
    shortest = float(t.busy[t.busy > 0].min())
    out = Text(no_wrap=True)
    scaled = _whole(t, columns) if shortest / per_column < 4 and not longest else None
    if scaled:  # whole columns for every action: nothing is rounded differently on two ranks
        columns, per_column = scaled, t.makespan / scaled
    shares = busy_shares(t, columns) if shortest < per_column * 0.999 else None
    for rank in ranks:
        out.append(f"{f'rank {rank}':<{label}}")
        for text, style in _shared(shares[rank], per_column) if shares is not None else _blocks(t, rank, per_column, columns):
            out.append(text, style)
        out.append("\n")
    out.append(_axis(t, label, columns))
    kinds = [k for code, k in enumerate(KINDS) if (t.table.kind == code).any()]
    words = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    for kind in kinds:
        out.append(f" {kind}{FILL[kind]} ", STYLE[kind])
        out.append(f" {words[kind]}   ")
    out.append("numbers: microbatches" if shares is None else "a column holds several actions: kinds by their share")
    return out


def _whole(t: Timeline, columns: int) -> int | None:
    """A number of columns at which every start is on a column's edge, if there is one."""
    starts = np.unique(np.round(t.start / t.makespan, 12))
    for count in range(columns, columns // 2, -1):
        if np.allclose(starts * count, np.round(starts * count), atol=1e-6):
            return count
    return None


def _blocks(t: Timeline, rank: int, per_column: float, columns: int) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    at = 0
    low, high = int(t.nodes.first[rank]), int(t.nodes.first[rank + 1])
    for node in range(low, high):
        row, other = int(t.nodes.row[node]), int(t.nodes.second[node])
        begin, end = round(t.start[node] / per_column), min(round(t.end[node] / per_column), columns)
        if end <= at:
            continue
        begin = max(begin, at)
        out.append(("·" * (begin - at), "dim"))
        at = end
        letter = KINDS[t.table.kind[row]]
        name = f"{letter}{t.table.microbatch[row]}"
        if other >= 0:
            half = (end - begin + 1) // 2
            back = f"{KINDS[t.table.kind[other]]}{t.table.microbatch[other]}"
            out.append((_cell(name, half, FILL[letter]), STYLE[letter]))
            out.append((_cell(back, end - begin - half, FILL["B"]), STYLE["B"]))
            continue
        out.append((_cell(name, end - begin, FILL[letter]), STYLE[letter]))
    out.append(("·" * (columns - at), "dim"))
    return out


def _cell(name: str, size: int, fill: str) -> str:
    """A block `size` columns wide: letter and number, else the number, else the shading."""
    for text in (name, name[1:]):
        if len(text) <= size:
            return text + fill * (size - len(text))
    return fill * size


def _shared(shares: np.ndarray, per_column: float) -> list[tuple[str, str]]:
    """Columns that hold several actions; over a few columns each kind gets its share. `shares` [kinds, columns] in seconds."""
    parts = np.concatenate([shares, per_column - shares.sum(axis=0, keepdims=True)]) / per_column
    owed = np.zeros(len(parts))
    out: list[tuple[str, str]] = []
    for column in parts.T:
        owed = np.where(column > 1e-9, owed + column, 0.0)
        kind = int(np.argmax(owed))
        owed[kind] -= 1.0
        out.append((FILL[KINDS[kind]], STYLE[KINDS[kind]]) if kind < len(KINDS) else ("·", "dim"))
    return out


def _axis(t: Timeline, label: int, columns: int) -> str:
    line = [" "] * columns
    for value in ticks(t.makespan, max(columns // 12, 2)):
        text, at = f"|{value:g}", round(value / t.makespan * columns)
        if at + len(text) <= columns:
            line[at : at + len(text)] = text
    return f"{'time':<{label}}{''.join(line).rstrip()}\n"
