"""JSON with the line of each key, read as every parser reads it and, where that fails, tolerantly: comments, commas too many or missing, single
quotes, bare words (placeholders that somebody substitutes). Each liberty is a problem of its own."""

from __future__ import annotations

import json
import re
from typing import Any

from ..document import Document, Path, Problem
from .source import DEEPEST, Broken, Lines

_SPACE = re.compile(r"[ \t\n\r\f\v\u00a0]+")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_BARE = re.compile(r"\$\{[^}\n]*\}|\{\{.*?\}\}|<[^<>\n]*>|[^\s,\[\]{}\"':]+")
_KEY = re.compile(r"\$\{[^}\n]*\}|[A-Za-z_$][\w$.-]*")
WORDS = {"true": True, "false": False, "null": None, "NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
PYTHON = {"True": True, "False": False, "None": None}


def read(name: str, text: str, lines: Lines | None = None, **part: Any) -> Document:
    """The document; `lines` maps offsets where the text is a part of a file. `Broken` where even the tolerant reading fails."""
    reader = _Reader(text, lines or Lines(text))
    data = reader.document()
    return Document(name, text, "json", data, reader.lines_of, tuple(reader.problems), **part)


class _Reader:
    def __init__(self, text: str, lines: Lines) -> None:
        self.text, self.where, self.at = text, lines, 0
        self.lines_of: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def line(self, offset: int | None = None) -> int:
        return self.where.at(self.at if offset is None else offset)

    def note(self, kind: str, message: str, path: Path = (), line: int | None = None) -> None:
        if len(self.problems) < 1000:
            self.problems.append(Problem(kind, message, line or self.line(), path=path))

    def document(self) -> Any:
        self.skip()
        if self.at == len(self.text):
            raise Broken("is empty", 1)
        data = self.value((), 0)
        self.skip()
        if self.at < len(self.text):
            raise Broken(f"goes on behind its end: {self.text[self.at : self.at + 30].split(chr(10))[0]!r}", self.line())
        return data

    def skip(self) -> None:
        while True:
            space = _SPACE.match(self.text, self.at)
            if space:
                self.at = space.end()
            comment = _COMMENT.match(self.text, self.at)
            if not comment:
                return
            self.note("comment", f"JSON has no comments: {comment.group()[:40].split(chr(10))[0]!r}")
            self.at = comment.end()

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def value(self, path: Path, depth: int) -> Any:
        if depth > DEEPEST:
            raise Broken(f"is nested more than {DEEPEST} deep", self.line())
        if self.peek() == "{" and not self.text.startswith("{{", self.at):
            return self.object(path, depth)
        if self.peek() == "[":
            return self.array(path, depth)
        return self.scalar(path)

    def scalar(self, path: Path) -> Any:
        text = self.string(path)
        if text is not None:
            return text
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            return _number(number.group())
        bare = _BARE.match(self.text, self.at)
        if not bare:
            found = self.peek()
            raise Broken(f"expected a value, found {found!r}" if found else "ends where a value should stand", self.line())
        word, line = bare.group(), self.line()
        self.at = bare.end()
        if word in WORDS:
            return WORDS[word]
        if word in PYTHON:
            self.note("broken", f"{word} is Python; JSON writes {json.dumps(PYTHON[word])}", path, line)
            return PYTHON[word]
        loose = _loose_number(word)
        if loose is not None:
            self.note("number", f"{word} is no number in JSON", path, line)
            return loose
        self.note("placeholder", f"{word[:60]} stands where a value should", path, line)
        return word

    def string(self, path: Path) -> str | None:
        found = _STRING.match(self.text, self.at)
        if found:
            self.at = found.end()
            try:
                return str(json.loads(found.group(), strict=False))
            except ValueError:
                self.note("broken", "a backslash that JSON does not know", path)
                return found.group()[1:-1]
        found = _SINGLE.match(self.text, self.at)
        if found:
            self.note("broken", "JSON quotes with \", not with '", path)
            self.at = found.end()
            return found.group()[1:-1]
        if self.peek() == '"':
            raise Broken("a quote is never closed", self.line())
        return None

    def key(self, path: Path) -> str:
        text = self.string(path)
        if text is not None:
            return text
        bare = _KEY.match(self.text, self.at)
        if not bare:
            raise Broken(f"expected a key in quotes, found {self.peek()!r}", self.line())
        self.at = bare.end()
        self.note("broken", f"the key {bare.group()[:60]} has no quotes", path)
        return bare.group()

    def object(self, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        opened = self.line()
        self.at += 1
        self.skip()
        while self.peek() != "}":
            if not self.peek():
                raise Broken("a { is never closed", opened)
            line = self.line()
            name = self.key(path)
            here = (*path, name)
            if name in found:
                self.note(
                    "duplicate-key", f"{name!r} stands twice (first on line {self.lines_of.get(here, opened)}); the last wins", here, line
                )
            self.lines_of[here] = line
            self.skip()
            if self.peek() not in (":", "="):
                raise Broken(f"a colon is missing behind {name!r}", self.line())
            self.at += 1
            self.skip()
            found[name] = self.value(here, depth + 1)
            self.comma("}", here)
        self.at += 1
        return found

    def array(self, path: Path, depth: int) -> list[Any]:
        found: list[Any] = []
        opened = self.line()
        self.at += 1
        self.skip()
        while self.peek() != "]":
            if not self.peek():
                raise Broken("a [ is never closed", opened)
            here = (*path, len(found))
            self.lines_of[here] = self.line()
            found.append(self.value(here, depth + 1))
            self.comma("]", here)
        self.at += 1
        return found

    def comma(self, end: str, path: Path) -> None:
        """A comma between members: none before the end, one otherwise."""
        line = self.line()
        self.skip()
        if self.peek() == ",":
            line = self.line()
            self.at += 1
            self.skip()
            if self.peek() == end:
                self.note("comma", f"a comma before {end}", path, line)
        elif self.peek() not in (end, ""):
            if self.peek() in "}]:":
                raise Broken(f"expected a comma or {end}, found {self.peek()!r}", self.line())
            self.note("comma", "a comma is missing", path, line)


def _number(text: str) -> int | float:
    if re.fullmatch(r"-?\d+", text):
        return int(text) if len(text) < 400 else float(text[:300])
    return float(text)


def _loose_number(word: str) -> int | float | None:
    """``500_000``, ``.5``, ``1.``, ``+3``, ``0x10``."""
    plain = word.replace("_", "")
    if len(plain) > 40 or not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", plain):
        return None
    return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
