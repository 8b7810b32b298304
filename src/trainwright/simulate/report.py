"""What a simulation shows: titled tables, figures for programs, and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of the same keys, in the order in which the columns are shown; units stand in the keys."""

    title: str
    rows: Sequence[Row]

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": [dict(r) for r in self.rows]}


@dataclass(frozen=True)
class Report:
    """One demonstration: `figures` are its numbers by name, `notes` what a reader should take away, `corrections` where a text errs and the right figure."""

    title: str
    tables: Sequence[Table] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    corrections: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "figures": dict(self.figures),
            "tables": [t.to_dict() for t in self.tables],
            "notes": list(self.notes),
            "corrections": list(self.corrections),
        }
