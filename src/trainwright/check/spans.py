"""Where a key stands in the text of a file: what an edit that keeps comments and layout needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .document import Path

_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)+", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^,\]}\s]+")


@dataclass(frozen=True)
class Span:
    """Offsets into the text: the key begins at `key`, its value runs over [start, end)."""

    key: int
    start: int
    end: int


def json_spans(text: str) -> Mapping[Path, Span]:
    """Every key of a JSON text (comments tolerated); empty where it is no JSON. The last of a key that stands twice wins, as in every parser."""
    found: dict[Path, Span] = {}
    try:
        _value(text, _skip(text, 0), (), found, 0)
    except (ValueError, IndexError):
        return {}
    return found


def _skip(text: str, at: int) -> int:
    hit = _SPACE.match(text, at)
    return hit.end() if hit else at


def _value(text: str, at: int, path: Path, found: dict[Path, Span], depth: int) -> int:
    """The end of the value that begins at `at`."""
    if depth > 100:
        raise ValueError("nested too deeply")
    if text[at] == "{":
        return _object(text, at, path, found, depth)
    if text[at] == "[":
        at, index = _skip(text, at + 1), 0
        while text[at] != "]":
            end = _value(text, at, (*path, index), found, depth + 1)
            found[(*path, index)] = Span(at, at, end)
            at, index = _comma(text, end), index + 1
        return at + 1
    hit = _STRING.match(text, at) or _SCALAR.match(text, at)
    if hit is None:
        raise ValueError("no value")
    return hit.end()


def _object(text: str, at: int, path: Path, found: dict[Path, Span], depth: int) -> int:
    at = _skip(text, at + 1)
    while text[at] != "}":
        hit = _STRING.match(text, at)
        if hit is None:
            raise ValueError("no key")
        colon = _skip(text, hit.end())
        if text[colon] != ":":
            raise ValueError("no colon")
        start, inner = _skip(text, colon + 1), (*path, hit.group()[1:-1])
        end = _value(text, start, inner, found, depth + 1)
        found[inner] = Span(at, start, end)
        at = _comma(text, end)
    return at + 1


def _comma(text: str, at: int) -> int:
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at
