"""How the one-forward-one-backward family orders one rank's work: a warm-up of forwards, then one forward and one
backward in turn, then what is left.
"""

from __future__ import annotations

import numpy as np

from .actions import B, F, I, Rows, W


def chunked(count: int, group: int, chunks: int, microbatches: int, rank: int, ranks: int, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Stage and microbatch of the k-th forward (or backward), k = 0..count-1, when chunks are dealt round robin.

    Groups of `group` microbatches run chunk 0, then chunk 1, ... (Narayanan et al. 2021, section 2.2); backwards take
    the chunks the other way round. A last group may be shorter.
    """
    k = np.arange(count)
    span = group * chunks
    turn = k // span
    size = np.minimum(group, microbatches - turn * group)
    inside = k - turn * span
    chunk, offset = inside // size, inside % size
    if backward:
        chunk = chunks - 1 - chunk
    return chunk * ranks + rank, turn * group + offset


def one_forward_one_backward(
    forward: tuple[np.ndarray, np.ndarray],
    backward: tuple[np.ndarray, np.ndarray],
    warmup: int,
    weight_lag: int | None = None,
    fuse: bool = False,
) -> Rows:
    """`warmup` forwards, then in turn k forward k + warmup and backward k, then the backwards that are left.

    `weight_lag` None keeps the backward whole; else it is split, and weight gradient k - lag follows input gradient k, the rest comes last.
    `fuse` makes each forward and backward of the steady phase one overlapped action. Each action's place in the list is counted, not searched for.
    """
    n = len(forward[0])
    warm = min(warmup, n)
    k = np.arange(n)
    rows = np.zeros((n * (2 if weight_lag is None else 3), 4), np.int64)

    def forwards_by(turn: np.ndarray) -> np.ndarray:
        return warm + np.minimum(turn + 1, n - warm)

    def weights_before(turn: np.ndarray) -> np.ndarray | int:
        return 0 if weight_lag is None else np.clip(turn - weight_lag, 0, n)

    turn = k - warm
    places = np.where(turn < 0, k, k + np.maximum(turn, 0) + weights_before(turn))
    rows[places, 0], rows[places, 1], rows[places, 2] = F, *forward
    if fuse:
        rows[places[warm:], 3] = 1
    places = forwards_by(k) + k + weights_before(k)
    rows[places, 0], rows[places, 1], rows[places, 2] = B if weight_lag is None else I, *backward
    if weight_lag is not None:
        turn = np.minimum(k + weight_lag, n)
        places = forwards_by(turn) + np.minimum(turn + 1, n) + k
        rows[places, 0], rows[places, 1], rows[places, 2] = W, *backward
    return rows


def straight(microbatches: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Stage and microbatch of every forward (or backward) of a rank with one chunk, in order."""
    return np.full(microbatches, rank), np.arange(microbatches)
