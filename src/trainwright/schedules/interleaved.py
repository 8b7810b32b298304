"""Interleaved 1F1B: layers dealt round robin into v chunks a rank, which divides the ramp by v."""

from __future__ import annotations

import numpy as np

from .actions import Rows, Schedule, require
from .sequence import chunked, one_forward_one_backward


def multiples_near(m: int, step: int) -> list[int]:
    low = m // step * step
    return [x for x in (low, low + step) if x > 0]


def rule(p: int, m: int, v: int) -> None:
    require(
        m % p == 0,
        f"interleaved schedules run groups of {p} microbatches (one a rank), and {m} do not divide into such groups",
        "microbatches",
        multiples_near(m, p),
    )


def order(p: int, m: int, v: int, rank: int) -> Rows:
    forward = chunked(m * v, p, v, m, rank, p, backward=False)
    backward = chunked(m * v, p, v, m, rank, p, backward=True)
    return one_forward_one_backward(forward, backward, warmup=2 * (p - 1 - rank) + (v - 1) * p)


def in_flight(p: object, m: object, v: object, r: object) -> np.ndarray:
    pp, mm, vv, rr = (np.asarray(x, float) for x in (p, m, v, r))
    return np.minimum(mm * vv, 2 * (pp - 1 - rr) + (vv - 1) * pp + 1) / vv


SCHEDULE = Schedule(
    name="interleaved-1f1b",
    aliases=("interleaved", "1f1b-interleaved", "vpp", "interleaved1f1b"),
    doc="v chunks a rank, groups of p microbatches chunk by chunk (depth first): the ramp divided by v, more messages.",
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2; Megatron-Core; PyTorch ScheduleInterleaved1F1B",
    order=order,
    period=lambda p: p,
    rule=rule,
    chunks="many",
    in_flight=in_flight,
    torch_class="Interleaved1F1B",
)
