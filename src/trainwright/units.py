"""Numbers with units: reading what people write and printing what they can read.

GB is 1e9 bytes and GiB is 2**30 bytes, always labelled. Every reader raises `SpecError` and accepts no nan, infinity or negative number.
"""

from __future__ import annotations

import math
import re

from .errors import SpecError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*$", re.IGNORECASE)


def _split(text: object, what: str, where: str) -> tuple[float, str]:
    found = _NUMBER.match(str(text)) if len(str(text)) < 64 else None
    if not found:
        negative = _NUMBER.match(str(text).strip().removeprefix("-")) if str(text).strip().startswith("-") else None
        if negative:
            raise SpecError(f"{str(text)[:60]!r} is negative", where, [str(text).strip()[1:].strip()])
        raise SpecError(f"{str(text)[:60]!r} is not {what}", where)
    value = float(found[1].replace(",", "").replace("_", ""))
    if not math.isfinite(value):
        raise SpecError(f"{str(text)[:60]!r} is not a finite number", where)
    return value, found[2].lower()


def parse_count(text: object, where: str = "", what: str = "a number such as 2T or 15e12") -> float:
    """``2T``, ``15e12``, ``405B``, ``1_000`` -> a plain number (k, M, B, T are powers of a thousand)."""
    value, unit = _split(text, what, where)
    if unit not in _COUNT:
        raise SpecError(f"{str(text)[:60]!r} ends in an unknown unit {unit!r}", where, ["k", "M", "B", "T"])
    return value * _COUNT[unit]


def parse_seconds(text: object, where: str = "") -> float:
    """``30d``, ``12h``, ``90min``, ``45s`` -> seconds."""
    value, unit = _split(text, "a duration such as 30d or 12h", where)
    if unit not in _SECONDS:
        raise SpecError(f"{str(text)[:60]!r} needs a unit of time", where, ["s", "min", "h", "d", "w"])
    return value * _SECONDS[unit]


def format_count(value: float) -> str:
    """70553706496 -> ``70.6B``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if abs(value) < 1000 * size else f"{value / size:,.0f}{unit}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Bytes as people read GPU memory: ``57.0 GiB``."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}" if abs(value) < 100 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """``380 ms``, ``12.4 s``, ``3.2 h``, ``17.5 d``."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if abs(value) >= 2 * size:
            return f"{value / size:.1f} {unit}"
    if abs(value) >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} us"


def format_usd(value: float) -> str:
    """``$12,300`` or ``$1.24M``."""
    if abs(value) >= 1e6:
        return f"${value / 1e6:,.2f}M"
    return f"${value:,.0f}" if abs(value) >= 100 else f"${value:.2f}"
