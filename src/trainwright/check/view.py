"""One reading's values by name, whichever way its format spells and nests them: ``zero_optimization.stage``, ``--zero-stage``, ``zero-stage``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from .document import Path
from .setup import Place, Reading

MOST_VALUES = 200_000
YES = frozenset(("true", "yes", "on", "1", "enable", "enabled"))
NO = frozenset(("false", "no", "off", "0", "none", "null", "", "disable", "disabled"))


class Value(NamedTuple):
    """A leaf: its value, its key path."""

    value: Any
    path: Path


class View:
    """`reading` with its leaves indexed by normalized name: lower case, ``-`` and ``_`` alike, list indices left out."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.format = reading.format
        self.document = reading.document

    @cached_property
    def names(self) -> dict[str, list[Value]]:
        """Every suffix of a leaf's dotted name -> leaves that end so."""
        found: dict[str, list[Value]] = {}
        for count, leaf in enumerate(_leaves(self.document.data, ())):
            if count > MOST_VALUES:
                break
            parts = [plain(p) for p in leaf.path if isinstance(p, str)]
            for start in range(max(0, len(parts) - 4), len(parts)):
                found.setdefault(".".join(parts[start:]), []).append(leaf)
        return found

    def all(self, *names: str) -> list[Value]:
        """Every leaf (or table) of one of these names; a name is the end of a dotted path."""
        return [leaf for name in names for leaf in self.names.get(plain(name), ())]

    def get(self, *names: str) -> Value | None:
        """The first of them, the shallowest where a name stands at several depths."""
        for name in names:
            found = self.names.get(plain(name))
            if found:
                return min(found, key=lambda leaf: len(leaf.path))
        return None

    def value(self, *names: str) -> Any:
        found = self.get(*names)
        return None if found is None else found.value

    def number(self, *names: str) -> float | None:
        """The value as a number; None for "auto", a placeholder, nothing."""
        return as_number(self.value(*names))

    def on(self, *names: str) -> bool:
        """Whether a switch is given and on."""
        found = self.get(*names)
        return found is not None and truthy(found.value)

    def place(self, path: Path | Value | None = None) -> Place:
        """Where a key stands; the document itself without one."""
        key = path.path if isinstance(path, Value) else (path or ())
        return Place(self.document.name, self.document.line(key) if key else None, key)


def plain(name: object) -> str:
    return str(name).strip().lstrip("-").replace("-", "_").lower()


def truthy(value: Any) -> bool:
    """What a switch means: true, yes, on, 1, or the bare flag."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    return isinstance(value, str) and value.strip().lower() in YES


def as_number(value: Any) -> float | None:
    """A number as YAML 1.1, JSON, argparse or shell write it (2e-5 as text, 500_000); None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and len(value) >= 40:
        return None
    try:
        found = (
            float(value.strip().replace("_", "")) if isinstance(value, str) else float(value) if isinstance(value, (int, float)) else None
        )
    except (ValueError, OverflowError):
        return None
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """A whole number above zero, None for anything else."""
    found = as_number(value)
    return int(found) if found is not None and 0 < found < 1e18 and found == int(found) else None


def _leaves(data: Any, path: Path) -> Iterator[Value]:
    """Leaves and the tables on the way to them, depth first."""
    stack: list[tuple[Any, Path]] = [(data, path)]
    while stack:
        found, here = stack.pop()
        if here:
            yield Value(found, here)
        if len(here) > 40:
            continue
        if isinstance(found, dict):
            stack += [(v, (*here, k if isinstance(k, (str, int)) else str(k))) for k, v in reversed(found.items())]
        elif isinstance(found, list):
            stack += [(v, (*here, i)) for i, v in reversed(list(enumerate(found[:1000]))) if isinstance(v, (dict, list))]
