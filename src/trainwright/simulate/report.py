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

    def text(self) -> str:
        """The report as plain text."""
        lines = [self.title, "=" * len(self.title)]
        for table in self.tables:
            lines += ["", *_text(table)]
        lines += ["", *(f"- {n}" for n in self.notes), *(f"! {c}" for c in self.corrections)]
        return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 or abs(value) >= 1e15 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _text(table: Table) -> list[str]:
    columns = list(table.rows[0]) if table.rows else []
    cells = [columns, *([cell(r[c]) for c in columns] for r in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    body = ["  ".join(word.rjust(width) for word, width in zip(row, widths)).rstrip() for row in cells]
    return [table.title, *body] if table.title else body
