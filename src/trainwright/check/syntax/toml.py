"""TOML through `tomllib`, with the line of each key from a scan of the text."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from ...errors import one_line
from ..document import Document, Path
from .source import DEEPEST, Broken

_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_PAIR = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'))*)\s*=(.*)$""")
_PIECE = re.compile(r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'""")


def read(name: str, text: str, **part: Any) -> Document:
    """The document; `Broken` with the line where tomllib refuses it."""
    if _deep(text):
        raise Broken(f"is nested more than {DEEPEST} deep")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        hit = re.search(r"\(at line (\d+)", str(error))
        kind = "duplicate-key" if "overwrite" in str(error) or "twice" in str(error) else "broken"
        raise Broken(one_line(error, 160), int(hit.group(1)) if hit else None, kind) from None
    return Document(name, text, "toml", _plain(data), _lines(text), (), **part)


def _deep(text: str) -> bool:
    """More brackets open at once than any configuration has (quotes are not looked at: only far too many matter)."""
    depth = most = 0
    for c in text:
        depth = depth + 1 if c in "[{" else max(0, depth - 1) if c in "]}" else depth
        most = max(most, depth)
    return most > DEEPEST


def _plain(data: Any) -> Any:
    """Dates as texts."""
    if isinstance(data, dict):
        return {k: _plain(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_plain(v) for v in data]
    return data if isinstance(data, (str, int, float, bool)) else str(data)


def _lines(text: str) -> dict[Path, int]:
    """Lines of tables and of the keys below them; values over several lines are skipped."""
    found: dict[Path, int] = {}
    base: Path = ()
    counts: dict[Path, int] = {}
    ends: str | None = None
    open_brackets = 0
    for number, line in enumerate(text.split("\n"), 1):
        if ends is not None:
            ends = None if ends in line else ends
            continue
        if open_brackets > 0:
            open_brackets += _balance(line)
            continue
        header = _HEADER.match(line)
        if header:
            base = _keys(header.group(2))
            if header.group(1) == "[[":
                counts[base] = counts.get(base, -1) + 1
                base = (*base, counts[base])
            found[base] = number
            continue
        pair = _PAIR.match(line)
        if pair:
            path = (*base, *_keys(pair.group(1)))
            for end in range(len(base) + 1, len(path) + 1):
                found.setdefault(path[:end], number)
            value = pair.group(2).strip()
            for quote in ('"""', "'''"):
                if value.startswith(quote) and quote not in value[3:]:
                    ends = quote
            open_brackets = _balance(value) if ends is None else 0
    return found


def _keys(text: str) -> Path:
    return tuple(_bare(piece) for piece in _PIECE.findall(text))


def _bare(piece: str) -> str:
    if piece.startswith("'"):
        return piece[1:-1]
    try:
        return str(json.loads(piece)) if piece.startswith('"') else piece
    except ValueError:
        return piece[1:-1]


def _balance(line: str) -> int:
    """Brackets opened less those closed, outside of quotes and comments."""
    bare = re.sub(r"""("(?:[^"\\]|\\.)*"|'[^']*')|#.*""", lambda m: "", line)
    return sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")
