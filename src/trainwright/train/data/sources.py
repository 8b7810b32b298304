"""Documents of a data source: the embedded text, a file, a folder or a glob of text and JSONL, each optionally gzipped."""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from ...errors import SpecError, nearest

EMBEDDED = "embedded"
TEXT_KINDS = (".txt", ".md", ".text")
LINE_KINDS = (".jsonl", ".ndjson")
TOKEN_KINDS = (".bin", ".npy")
MAX_LINE = 64 * 2**20


def embedded_text() -> str:
    """Romeo and Juliet, 133 kB of ASCII."""
    return resources.files(__package__).joinpath("romeo_and_juliet.txt").read_text(encoding="ascii")


def files_of(data: str) -> list[Path]:
    """The files behind a path, a folder (searched through) or a glob, sorted by name. Raises `SpecError` where there is none."""
    path = Path(data).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p) is not None and not p.name.startswith("."))
        if not found:
            raise SpecError(f"the folder holds no {', '.join((*TEXT_KINDS, *LINE_KINDS))} file", data)
        return found
    if glob.has_magic(data):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise SpecError("no file matches", data)
        return found
    beside = [EMBEDDED] + ([str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else [])
    raise SpecError("there is no such file or folder", data, nearest(data, beside))


def kind_of(path: Path) -> str | None:
    """``text``, ``lines`` or ``tokens`` by the name of a file (``.gz`` aside); None where the name says nothing."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    last = suffixes[-1] if suffixes else ""
    return "text" if last in TEXT_KINDS else "lines" if last in LINE_KINDS else "tokens" if last in TOKEN_KINDS else None


def documents(data: str, field: str = "text") -> Iterator[str]:
    """Every document: a text file is one, so is each line of a JSONL file (a string, or an object with `field`). Empty ones are left out."""
    if data == EMBEDDED:
        yield embedded_text()
        return
    for path in files_of(data):
        if kind_of(path) == "tokens":
            raise SpecError("holds tokens; it stands alone, not among text", str(path))
        found = _lines(path, field) if kind_of(path) == "lines" else _text(path)
        yield from (text for text in found if text.strip())


def _text(path: Path) -> Iterator[str]:
    try:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rb") as f:
            yield f.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"is not text (UTF-8) at byte {error.start:,}", str(path)) from None
    except (OSError, EOFError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from None


def _lines(path: Path, field: str) -> Iterator[str]:
    try:
        opener = gzip.open if path.suffix.lower() == ".gz" else open
        with opener(path, "rb") as f:
            for number, line in enumerate(iter(lambda: f.readline(MAX_LINE), b""), 1):
                if line.strip():
                    yield _document(line, field, f"{path}, line {number}")
    except (OSError, EOFError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from None


def _document(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise SpecError("is no JSON", where) from None
    text = row.get(field) if isinstance(row, dict) else row
    if not isinstance(text, str):
        keys = nearest(field, row) or list(row)[:8] if isinstance(row, dict) else []
        raise SpecError(f"has no text under {field!r}", where, keys)
    return text
