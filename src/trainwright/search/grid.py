"""The rows of a space under construction: choices that expand them, rules that drop them and are credited with what a row would have become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost.table import IntColumn, PlanTable
from ..spec.plan import NUMBERS, Structure
from .rules import Case, Rule


@dataclass
class Grid:
    """Rows under construction. `options` holds, for every choice that is still open, how many values each row will have."""

    columns: dict[str, IntColumn]
    options: dict[str, IntColumn]
    constant: int = 1
    removed: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def weight(self) -> IntColumn:
        total = np.full(len(self), self.constant, dtype=np.int64)
        for count in self.options.values():
            total *= count
        return total

    def take(self, rows: np.ndarray) -> None:
        self.columns = {k: v[rows] for k, v in self.columns.items()}
        self.options = {k: v[rows] for k, v in self.options.items()}

    def expand(self, name: str, counts: IntColumn, values: dict[str, IntColumn]) -> None:
        """Row i becomes counts[i] rows; `values` are the new columns of all of them in order. The choice `name` is made."""
        rows = np.repeat(np.arange(len(self)), counts)
        self.options.pop(name, None)
        self.take(rows)
        self.columns |= values

    def table(self, structure: Structure, rows: np.ndarray | None = None) -> PlanTable:
        n = len(self) if rows is None else len(rows)
        ones = np.ones(n, dtype=np.int64)
        columns = {k: ones if k not in self.columns else self.columns[k] if rows is None else self.columns[k][rows] for k in NUMBERS}
        return PlanTable((structure,), np.zeros(n, dtype=np.int64), **columns)

    def apply(self, case: Case, rules: Sequence[Rule], structures: dict[int, Structure], code: str = "") -> None:
        """Drops the rows that a rule refuses. `structures` by the values of the column `code` (one entry where there is none)."""
        keep = np.ones(len(self), dtype=bool)
        weight = self.weight()
        for value, structure in structures.items():
            rows = np.flatnonzero(self.columns[code] == value) if code else np.arange(len(self))
            table = self.table(structure, rows)
            alive = np.ones(len(rows), dtype=bool)
            for rule in rules:
                refused = alive & ~rule.allows(case, structure, table)
                if refused.any():
                    self.removed[rule.name] = self.removed.get(rule.name, 0) + int(weight[rows[refused]].sum())
                    alive &= ~refused
            keep[rows] = alive
        if not keep.all():
            self.take(np.flatnonzero(keep))


def lookup(column: IntColumn, count: object) -> IntColumn:
    """`count` of each distinct value, as a column."""
    distinct, back = np.unique(column, return_inverse=True)
    return np.array([count(int(d)) for d in distinct], dtype=np.int64)[back.reshape(-1)]  # type: ignore[operator]


def choices(column: IntColumn, choose: object) -> tuple[IntColumn, list[IntColumn]]:
    """For each row the lists that `choose` gives for its value: how many, and all of them one after another, one array a list."""
    distinct, back = np.unique(column, return_inverse=True)
    lists = [choose(int(d)) for d in distinct]  # type: ignore[operator]
    width = len(lists[0] if lists else choose(1))  # type: ignore[operator]
    sizes = np.array([len(choice[0]) for choice in lists], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    back = back.reshape(-1)
    counts = sizes[back] if len(lists) else np.zeros(0, np.int64)
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.repeat(starts[back], counts) + within if total else np.zeros(0, np.int64)
    flat = [
        np.concatenate([np.asarray(choice[k], dtype=np.int64) for choice in lists]) if lists else np.zeros(0, np.int64)
        for k in range(width)
    ]
    return counts, [f[index] for f in flat]
