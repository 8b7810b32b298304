"""What a check says: how bad, where, what happens, and the smallest change that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from .document import Path
from .setup import Place, Setup


class Severity(IntEnum):
    """`ERROR` cannot run, or trains something else than what is written; `BLOCKED` cannot run as written since a placeholder is left;
    `WARNING` runs, but probably not as meant; `NOTE` is worth knowing, often right."""

    NOTE = 0
    WARNING = 1
    BLOCKED = 2
    ERROR = 3


LABELS: Mapping[Severity, str] = {
    Severity.ERROR: "error",
    Severity.BLOCKED: "cannot run as written",
    Severity.WARNING: "warning",
    Severity.NOTE: "note",
}


@dataclass(frozen=True)
class Change:
    """Set the key at `path` of file `file` to `value`; `remove`: delete the key; `rename`: the key keeps its value under this name."""

    file: str
    path: Path
    value: Any = None
    remove: bool = False
    rename: str | None = None

    def applied(self, data: Any) -> Any:
        """The data with the change in it; None where its place is not there."""
        if not self.path:
            return None
        head, *rest = self.path
        below = replace(self, path=tuple(rest))
        if isinstance(data, list) and isinstance(head, int) and head < len(data) and rest:
            inner = below.applied(data[head])
            return None if inner is None else [*data[:head], inner, *data[head + 1 :]]
        if not isinstance(data, dict):
            return None
        if rest:
            inner = below.applied(data.get(head, {}))
            return None if inner is None else {**data, head: inner}
        if self.remove:
            return {k: v for k, v in data.items() if k != head}
        if self.rename is not None:
            return {(self.rename if k == head else k): v for k, v in data.items()} if head in data else None
        return {**data, head: self.value}


@dataclass(frozen=True)
class Finding:
    """`check` is the id (K01 ... K40), `what` one sentence that says what happens, `mend` one that says the smallest change; `changes` do it."""

    check: str
    severity: Severity
    place: Place
    what: str
    mend: str = ""
    changes: tuple[Change, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "check": self.check,
            "severity": LABELS[self.severity],
            "file": self.place.file,
            "line": self.place.line,
            "key": ".".join(str(p) for p in self.place.path),
            "what": self.what,
            "mend": self.mend,
        }


@dataclass(frozen=True)
class Example:
    """Files (name -> text), a launch line, a model and a cluster that together show one fault, as small as they can be."""

    files: Mapping[str, str] = field(default_factory=dict)
    launch: str = ""
    model: str = ""
    on: str = ""


@dataclass(frozen=True)
class Check:
    """One entry of the registry of checks: a module of `trainwright.check.checks` with ``CHECK``.

    `severity` says in words which severity it gives when; `right` what looks like this fault and is none.
    """

    name: str  # K01
    title: str  # unknown key
    run: Callable[[Setup], Iterable[Finding]]
    example: Example
    severity: str
    right: str = ""
    aliases: tuple[str, ...] = ()
