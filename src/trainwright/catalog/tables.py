"""The data files of this package, read once each: comma-separated tables and JSON documents."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from ..errors import SpecError


def text(*path: str) -> str:
    """A data file of the package as text."""
    return resources.files(__package__).joinpath(*path).read_text(encoding="utf-8")


@cache
def rows(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a comma-separated table."""
    return tuple(csv.DictReader(text(name).splitlines()))


@cache
def document(*path: str) -> Any:
    """A JSON document of the package. Whoever changes it copies it first."""
    return json.loads(text(*path))


def plain(name: str) -> str:
    """A name as it is compared: lower case, words joined by one hyphen, makers' names left out.

    ``NVIDIA H100 80GB HBM3``, ``H100-80GB-HBM3`` and ``h100_80gb_hbm3`` are one name.
    """
    words = re.split(r"[\s_\-]+", name.strip().lower())
    makers = ("nvidia", "amd", "intel", "instinct", "tesla", "geforce", "google", "aws")
    kept = [w for w in words if w and w not in makers]
    return "-".join(kept or words)


def number(table: Mapping[str, Any], key: str, where: str, *, most: float = 1e12, zero: bool = False) -> float | None:
    """A number of a table, None where it is left out. `SpecError` for anything that is not a finite number in range."""
    value = table.get(key)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise SpecError(f"{str(value)[:40]!r} is not a number", f"{where}.{key}")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise SpecError(f"{str(value)[:40]!r} is not a number", f"{where}.{key}") from None
    if not (0 <= found <= most) or (found == 0 and not zero):
        raise SpecError(f"{str(value)[:40]} is not between {0 if zero else 'zero (left out)'} and {most:g}", f"{where}.{key}")
    return found


def index(entries: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """{plain name or alias: id}; the id wins over an alias of another entry."""
    table: dict[str, str] = {}
    known = [(name, tuple(a for a in aliases if a)) for name, aliases in entries]
    for name, aliases in known:
        for alias in aliases:
            table.setdefault(plain(alias), name)
    table.update({plain(name): name for name, _ in known})
    return table
