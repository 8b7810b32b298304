"""GPipe: every forward, then every backward."""

from __future__ import annotations

import numpy as np

from .actions import Rows, Schedule
from .sequence import one_forward_one_backward, straight


def order(p: int, m: int, v: int, rank: int) -> Rows:
    return one_forward_one_backward(straight(m, rank), straight(m, rank), warmup=m)


SCHEDULE = Schedule(
    name="gpipe",
    aliases=("afab", "fill-drain"),
    doc="All forwards, then all backwards: the bubble of 1F1B at the memory of every microbatch.",
    source="Huang et al. 2019, GPipe, arXiv:1811.06965; PyTorch ScheduleGPipe",
    order=order,
    in_flight=lambda p, m, v, r: np.asarray(m, float) + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (m, m, m),
    torch_class="GPipe",
)
