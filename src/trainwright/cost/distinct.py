"""The different combinations of a few columns, found without sorting: what depends on them alone is computed once each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .table import IntColumn

MAX_TABLE = 2**21  # entries of a lookup table; wider ranges are sorted


def distinct(columns: Sequence[IntColumn]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(a row of each different combination, the combination of each row): ``column[first][where] == column`` for every column."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        low = int(column.min(initial=0))
        values, place = _compress(column - low if low < 0 else column)
        code = code * values + place if size > 1 else place
        size *= values
        if size > MAX_TABLE:
            size, code = _compress(code)
    size, where = _compress(code)
    first = np.zeros(size, dtype=np.intp)
    first[where] = np.arange(len(where))
    return first, where


def _compress(code: IntColumn) -> tuple[int, IntColumn]:
    """Codes as numbers 0 ... n - 1 in the same order."""
    top = int(code.max(initial=0)) + 1
    if top > MAX_TABLE:
        values, place = np.unique(code, return_inverse=True)
        return len(values), place
    seen = np.zeros(top, dtype=np.int64)
    seen[code] = 1
    number = np.cumsum(seen)
    return int(number[-1]), number[code] - 1
