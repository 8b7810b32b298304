"""What can go wrong, by name.

    TrainwrightError            anything that this package raises on purpose
    +-- SpecError               an input is wrong: what was found, where, what would be right

Nothing below the command line catches these; the command line prints ``str(error)`` and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TrainwrightError(Exception):
    """Base class of every error that this package raises on purpose."""


class SpecError(TrainwrightError, ValueError):
    """An input is wrong.

    `message` says what was found and what was expected, `where` names the place (``strategy.tp``, a file, a flag) and `nearest`
    the nearest legal value or values. ``str()`` is one line.
    """

    def __init__(self, message: str, where: str = "", nearest: str | Iterable[object] = ()) -> None:
        self.message = one_line(message)
        self.where = one_line(where)
        self.nearest = one_line(nearest if isinstance(nearest, str) else ", ".join(str(n) for n in nearest))
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} (nearest: {self.nearest})" if self.nearest else text


def expect(kind: Any, what: str, /, **arguments: object) -> None:
    """Raises `SpecError` for an argument of another type: wrong input of a library, too, is one line that says what and where. A truth value is no number."""
    for where, value in arguments.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SpecError(f"{one_line(repr(value), 40)} is not {what}", where)


def one_line(text: object, limit: int = 600) -> str:
    """Text on one line, control characters dropped, so that a message stays one line whatever a user typed."""
    flat = " ".join(str(text).split())
    flat = "".join(c for c in flat if c.isprintable())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def nearest(word: object, choices: Iterable[str], count: int = 3) -> list[str]:
    """The choices most like `word`, best first; the shortest few where nothing is like it."""
    names = list(dict.fromkeys(choices))
    by_lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(str(word).lower(), by_lower, n=count, cutoff=0.5)
    return [by_lower[f] for f in found]


def unknown(kind: str, word: object, choices: Iterable[str], where: str = "") -> SpecError:
    """The error for a name that is not in a list: names the nearest ones, or all of a short list."""
    names = sorted(set(choices))
    near = nearest(word, names) or (names if len(names) <= 16 else [])
    return SpecError(f"unknown {kind} {str(word)[:80]!r}", where, near)
