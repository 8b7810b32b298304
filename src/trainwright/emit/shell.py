"""Shell text. Every word that comes from a person or a plan passes `quote`: nothing of it is ever run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from ..errors import SpecError
from .base import Setting

HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"
FROM_HERE = 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'


class Raw(str):
    """Shell text of this package's own, such as ``"$HEAD_NODE"``: written as it is. Never made from anybody's input."""


def quote(word: object) -> str:
    """The word as the shell has to see it. Control characters have no place in a command and are refused."""
    if isinstance(word, Raw):
        return word
    text = str(word)
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise SpecError(f"{text[:60]!r} holds control characters", "options")
    return shlex.quote(text)


def comment(text: object) -> str:
    """Text on one line after ``#``."""
    return "# " + " ".join(str(text).split())


def exports(settings: Iterable[Setting]) -> str:
    """``export NAME=value`` lines, each under its reason."""
    return "".join(f"{comment(s.reason)}\nexport {s.name}={quote(s.value)}\n" for s in settings)


def command(words: Sequence[str], flags: Iterable[tuple[str, object]] = (), tail: str = "", after: str = "") -> str:
    """A command over several lines, each flag with its value on a line of its own; a value of True stands for the flag alone.

    `words`, `tail` and `after` are taken as they are: quote them before.
    """
    lines = [" ".join(words)]
    for flag, value in flags:
        if value is True:
            lines.append(flag)
        elif isinstance(value, (list, tuple)):
            lines.append(" ".join([flag, *(quote(v) for v in value)]))
        else:
            lines.append(f"{flag} {quote(value)}")
    lines += [t for t in (tail, after) if t]
    return " \\\n  ".join(lines) + "\n"


def words(text: str) -> list[str]:
    """The words of a shell script's commands, comments and line continuations gone. Reads, never runs; a script that does not split is empty."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:
        return []


def flags_of(text: str) -> dict[str, list[str]]:
    """{"--flag": [its values]} of a script, the last of a repeated flag; ``--a=b`` and ``--a b`` are the same."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words(text):
        if re.match(r"^--[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            current = [value] if equals else []
            found[flag] = current
        elif current is not None:
            current.append(word)
    return found


def number(flags: dict[str, list[str]], flag: str) -> int | None:
    """The whole number after a flag, None where there is none."""
    values = flags.get(flag)
    return int(values[0]) if values and re.fullmatch(r"-?[0-9]+", values[0]) else None
