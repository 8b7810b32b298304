"""A shuffled order that is computed, not kept: place i of the order is known without the other places, on every rank, after every restart.

A Feistel network over the next power of four is a bijection; walking its cycle until the value falls below n makes it one of range(n) (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Nothing is stored, whatever n is.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
_GOLDEN, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def shuffled(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The items (int64) at `places` of the order of range(n) that `seed` and `epoch` determine."""
    half = np.uint64(max(1, ((max(n, 2) - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(_mix(np.uint64(seed & (2**64 - 1))) + _mix(np.uint64(epoch) + _GOLDEN) + np.arange(ROUNDS, dtype=np.uint64) * _GOLDEN)
    out = np.asarray(places, dtype=np.uint64).copy()
    todo = np.arange(out.size)
    while todo.size:
        left, right = out[todo] >> half, out[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= np.uint64(n)]
    return out.astype(np.int64)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    z = np.atleast_1d(np.asarray(x, np.uint64))
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))
