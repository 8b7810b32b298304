"""The ``measured`` table of a GPU in a user's file, which `trainwright calibrate` writes: numbers of this very machine in place of the laws' constants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SpecError, nearest
from ..spec.cluster import CollectiveCurve, Measured

TABLES = ("matmul", "attention", "passes", "loss", "optimizer", "host", "overlap", "step", "memory")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
MOST_POINTS, DEEPEST = 10_000, 4


def read_measured(table: Any, where: str) -> Measured:
    """Raises `SpecError` for anything that is not a table of finite positive numbers under the names of ``kernels.toml``."""
    if not isinstance(table, Mapping):
        raise SpecError("is no table", where)
    for key in table:
        if key not in ("kernels", "collective", "source"):
            raise SpecError(f"unknown key {str(key)[:60]!r}", where, nearest(str(key), ("kernels", "collective", "source")))
    kernels = table.get("kernels", {})
    if not isinstance(kernels, Mapping):
        raise SpecError("is no table", f"{where}.kernels")
    for key in kernels:
        if key not in TABLES:
            raise SpecError(f"unknown table {str(key)[:60]!r}", f"{where}.kernels", nearest(str(key), TABLES) or TABLES)
    _check(kernels, f"{where}.kernels", 0)
    curves = table.get("collective", [])
    if not isinstance(curves, Sequence) or isinstance(curves, str):
        raise SpecError("is no list of tables", f"{where}.collective")
    return Measured(kernels, tuple(_curves(curves, f"{where}.collective")), str(table.get("source", ""))[:500])


def _check(value: Any, where: str, depth: int) -> None:
    if isinstance(value, Mapping) and depth < DEEPEST:
        for key, inner in value.items():
            _check(inner, f"{where}.{str(key)[:40]}", depth + 1)
    elif isinstance(value, list) and len(value) <= 2:
        for inner in value:
            _check(inner, where, DEEPEST)
    elif isinstance(value, str) and depth:
        return
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        raise SpecError(f"{str(value)[:40]!r} is no number that was measured", where)


def _curves(rows: Sequence[Any], where: str) -> Iterator[CollectiveCurve]:
    for n, row in enumerate(rows, 1):
        here = f"{where}, {n}"
        if not isinstance(row, Mapping) or row.get("kind") not in COLLECTIVES:
            raise SpecError("names no collective", f"{here}.kind", COLLECTIVES)
        ranks, sizes, seconds = row.get("ranks"), row.get("bytes"), row.get("seconds")
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= 100_000:
            raise SpecError("is no number of ranks", f"{here}.ranks")
        for name, column in (("bytes", sizes), ("seconds", seconds)):
            if not isinstance(column, list) or not 1 <= len(column) <= MOST_POINTS:
                raise SpecError("is no list of numbers", f"{here}.{name}")
            if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < 1e18 for x in column):
                raise SpecError("has an entry that is no positive number", f"{here}.{name}")
        x, y = (tuple(float(v) for v in row[name]) for name in ("bytes", "seconds"))
        if len(x) != len(y) or any(b <= a for a, b in itertools.pairwise(x)):
            raise SpecError("needs rising sizes and a time for each", here)
        yield CollectiveCurve(str(row["kind"]), ranks, x, y)
