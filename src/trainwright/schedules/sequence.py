"""How the one-forward-one-backward family orders one rank's work: a warm-up of forwards, then one forward and one
backward in turn, then what is left.
"""

from __future__ import annotations

import numpy as np

from .actions import B, F, I, Rows, W


def chunked(
    count: int, group: int, chunks: int, microbatches: int, rank: int, ranks: int, backward: bool
) -> tuple[np.ndarray, np.ndarray]:
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
    """`warmup` forwards, then forward k + warmup and backward k in turn, then the backwards that are left.

    `weight_lag` None keeps the backward whole; else it is split, and weight gradient k - lag follows input gradient
    k, the rest comes last. `fuse` makes each forward and backward of the steady phase one overlapped action. Built by
    sorting on (turn, place within the turn).
    """
    n = len(forward[0])
    warmup = min(warmup, n)
    k = np.arange(n)
    turn = [np.where(k < warmup, -1, k - warmup), k]
    place = [np.zeros(n, np.int64), np.ones(n, np.int64)]
    kinds = [np.full(n, F), np.full(n, B if weight_lag is None else I)]
    stages, microbatches = [forward[0], backward[0]], [forward[1], backward[1]]
    fused = [(k >= warmup).astype(np.int64) if fuse else np.zeros(n, np.int64), np.zeros(n, np.int64)]
    if weight_lag is not None:
        turn.append(np.minimum(k + weight_lag, n))
        place.append(np.full(n, 2))
        kinds.append(np.full(n, W))
        stages.append(backward[0])
        microbatches.append(backward[1])
        fused.append(np.zeros(n, np.int64))
    index = np.concatenate([k] * len(turn))
    order = np.lexsort((index, np.concatenate(place), np.concatenate(turn)))
    columns = (kinds, stages, microbatches, fused)
    return np.stack([np.concatenate(c)[order] for c in columns], axis=1)


def straight(microbatches: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Stage and microbatch of every forward (or backward) of a rank with one chunk, in order."""
    return np.full(microbatches, rank), np.arange(microbatches)
