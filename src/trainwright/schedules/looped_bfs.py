"""Looped breadth-first: every microbatch through chunk 0, then every one through chunk 1: one gradient reduction and
one parameter gather a chunk.
"""

from __future__ import annotations

import numpy as np

from .actions import B, F, Rows, Schedule


def order(p: int, m: int, v: int, rank: int) -> Rows:
    chunk, microbatch = np.divmod(np.arange(m * v), m)
    stage = chunk * p + rank
    zero = np.zeros(m * v, np.int64)
    forward = np.stack([zero + F, stage, microbatch, zero], axis=1)
    backward = np.stack([zero + B, stage, microbatch, zero], axis=1)
    return np.concatenate([forward, backward[::-1]])


SCHEDULE = Schedule(
    name="looped-bfs",
    aliases=("loopedbfs", "breadth-first"),
    doc="Every microbatch through a chunk before the next: interleaved's bubble, GPipe's memory, fewest collectives.",
    source="Lamy-Poirier 2023, arXiv:2211.05953; PyTorch ScheduleLoopedBFS",
    order=order,
    chunks="many",
    in_flight=lambda p, m, v, r: np.asarray(m, float) + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (m, m, m),
    torch_class="LoopedBFS",
)
