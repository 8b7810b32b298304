"""Megatron's combined 1F1B: interleaved 1F1B whose forward and backward of the steady phase run as one piece, so that
expert all-to-all of one hides behind the other.
"""

from __future__ import annotations

import numpy as np

from . import interleaved
from .actions import Rows, Schedule
from .sequence import chunked, one_forward_one_backward


def order(p: int, m: int, v: int, rank: int) -> Rows:
    forward = chunked(m * v, p, v, m, rank, p, backward=False)
    backward = chunked(m * v, p, v, m, rank, p, backward=True)
    warmup = 2 * (p - 1 - rank) + (v - 1) * p + 1  # one more than interleaved: a pair must not need its own forward
    return one_forward_one_backward(forward, backward, warmup, fuse=True)


def in_flight(p: object, m: object, v: object, r: object) -> np.ndarray:
    mm, vv = np.asarray(m, float), np.asarray(v, float)
    return np.minimum(mm, interleaved.in_flight(p, 1 << 40, v, r) + 1 / vv)


SCHEDULE = Schedule(
    name="combined-1f1b",
    aliases=("megatron-combined-1f1b", "combined", "1f1b-expert-overlap"),
    doc="Interleaved 1F1B with one more warm-up chunk and overlapped pairs, to hide expert all-to-all.",
    source="Megatron-Core pipeline_parallel/combined_1f1b.py",
    order=order,
    period=lambda p: p,
    rule=interleaved.rule,
    chunks="many",
    overlaps=True,
    in_flight=in_flight,
    ends=lambda p, m, v: (np.minimum(m, 2 * np.asarray(p)), np.minimum(m, 2), np.minimum(m, 2)),
)
