"""1F1B and eager 1F1B: a short warm-up, then forward and backward in turn. It changes memory, not the bubble."""

from __future__ import annotations

import numpy as np

from .actions import Rows, Schedule
from .sequence import one_forward_one_backward, straight


def order(p: int, m: int, v: int, rank: int) -> Rows:
    return one_forward_one_backward(straight(m, rank), straight(m, rank), warmup=p - 1 - rank)


def eager_order(p: int, m: int, v: int, rank: int) -> Rows:
    return one_forward_one_backward(straight(m, rank), straight(m, rank), warmup=2 * (p - 1 - rank))


ONE = Schedule(
    name="1f1b",
    aliases=("pipedream-flush", "dapple", "1f1b-flush"),
    doc="p-1-r warm-up forwards, then one forward, one backward: GPipe's bubble, at most p - r microbatches in memory.",
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1; Fan et al. 2021 (DAPPLE); PyTorch Schedule1F1B",
    order=order,
    period=lambda p: 1,
    in_flight=lambda p, m, v, r: np.minimum(m, np.subtract(p, r)).astype(float),
    ends=lambda p, m, v: (np.minimum(m, p), 1, 1),
    torch_class="1F1B",
)
EAGER = Schedule(
    name="eager-1f1b",
    doc="1F1B with twice the warm-up: latency between stages is hidden, for 2(p - r) - 1 microbatches in memory.",
    source="Zhuang et al. 2023, arXiv:2211.05322 (eager-1F1B)",
    order=eager_order,
    period=lambda p: 1,
    in_flight=lambda p, m, v, r: np.minimum(m, 2 * np.subtract(p, r) - 1).astype(float),
    ends=lambda p, m, v: (np.minimum(m, 2 * np.asarray(p) - 1), 1, 1),
)
SCHEDULE = (ONE, EAGER)
