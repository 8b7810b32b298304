"""What a check says: how bad, where, what happens, and the smallest change that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from .document import Path
from .setup import Place, Setup


class Severity(IntEnum):
    """`ERROR` cannot run, or trains something else than what is written; `BLOCKED` cannot run as written since a placeholder is left."""

    NOTE = 0
    WARNING = 1
    BLOCKED = 2
    ERROR = 3


@dataclass(frozen=True)
class Change:
    """Set the key at `path` of file `file` to `value`; `remove`: delete the key; `rename`: the key keeps its value under this name."""

    file: str
    path: Path
    value: Any = None
    remove: bool = False
    rename: str | None = None


@dataclass(frozen=True)
class Finding:
    """`check` is the id (K01 ... K40), `what` one sentence that says what happens, `mend` one that says the smallest change; `changes` do it."""

    check: str
    severity: Severity
    place: Place
    what: str
    mend: str = ""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Check:
    """One entry of the registry of checks: a module of `trainwright.check.checks` with ``CHECK``."""

    name: str  # K01
    title: str  # unknown key
    run: Callable[[Setup], Iterable[Finding]]
    aliases: tuple[str, ...] = ()
    example: str = ""  # a faulty file, smallest that shows it; the documentation and the battery of tests use it
