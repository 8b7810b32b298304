"""From bytes to text: what no reader should see is caught here, in one line each."""

from __future__ import annotations

import re
from bisect import bisect_right

from ..document import Problem

LARGEST_BYTES = 8_000_000
DEEPEST = 100  # nested containers; configurations have fewer than ten


class Broken(Exception):
    """A reader cannot go on at this line."""

    def __init__(self, message: str, line: int | None = None, kind: str = "broken") -> None:
        self.message, self.line, self.kind = message, line, kind
        super().__init__(message)

    def problem(self) -> Problem:
        return Problem(self.kind, self.message, self.line, fatal=True)


def decoded(raw: bytes | str) -> tuple[str, list[Problem]]:
    """The text of a file with ``\\n`` line ends and no byte order mark, and what was odd. Empty with a fatal problem where it is no text."""
    if len(raw) > LARGEST_BYTES:
        return "", [
            Problem("too-large", f"{len(raw) / 1e6:.0f} MB: no configuration is larger than {LARGEST_BYTES // 10**6} MB", fatal=True)
        ]
    problems: list[Problem] = []
    text = raw if isinstance(raw, str) else _decode(raw, problems)
    if text.startswith("\ufeff"):
        text = text[1:]
        problems.append(Problem("bom", "begins with a byte order mark", 1))
    if "\0" in text or _odd(text):
        return "", [Problem("binary", "is no text (binary data)", 1, fatal=True)]
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    marker = re.search(r"^(<{7} |>{7} |={7}$)", text, re.MULTILINE)
    if marker and re.search(r"^<{7}", text, re.MULTILINE) and re.search(r"^>{7}", text, re.MULTILINE):
        line = text.count("\n", 0, marker.start()) + 1
        problems.append(Problem("merge-marker", "an unresolved merge conflict", line))
    return text, problems


def _decode(raw: bytes, problems: list[Problem]) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problems.append(Problem("utf-16", "is UTF-16, which no engine reads", 1))
        try:
            return raw.decode("utf-16")
        except UnicodeDecodeError:
            return "\0"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in raw[:4096]:
            return "\0"
        problems.append(Problem("encoding", "is not UTF-8", raw.count(b"\n", 0, error.start) + 1))
        return raw.decode("latin-1")


def _odd(text: str) -> bool:
    """More than one control character in fifty, in the beginning."""
    head = text[:4096]
    return sum(ord(c) < 32 and c not in "\t\n\r\f\x1b" for c in head) * 50 > max(len(head), 50)


class Lines:
    """Line numbers of offsets into a text, from 1."""

    def __init__(self, text: str, first: int = 1) -> None:
        self.first = first
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def at(self, offset: int) -> int:
        return bisect_right(self.starts, offset) + self.first - 1
