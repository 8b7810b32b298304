"""Zero-bubble schedules on one pass over the ranks: the backward is split, only the input gradient is on the critical
path, weight gradients fill the holes.
"""

from __future__ import annotations

import numpy as np

from .actions import Rows, Schedule, require
from .sequence import chunked, one_forward_one_backward, straight


def h1_order(p: int, m: int, v: int, rank: int) -> Rows:
    return one_forward_one_backward(straight(m, rank), straight(m, rank), warmup=p - 1 - rank, weight_lag=rank)


def h2_order(p: int, m: int, v: int, rank: int) -> Rows:
    return one_forward_one_backward(straight(m, rank), straight(m, rank), warmup=2 * (p - 1 - rank), weight_lag=2 * rank)


def rounds(p: int, m: int) -> int:
    """Groups into which PyTorch cuts m microbatches: as many as there are whole p in m, at least one."""
    return max(1, m // p)


def interleaved_rule(p: int, m: int, v: int) -> None:
    n = rounds(p, m)
    near = [x for d in range(1, p + 1) for x in (m - d, m + d) if x > 0 and x % rounds(p, x) == 0][:2]
    require(
        m % n == 0,
        f"{m} microbatches do not divide into {n} equal groups (as many as there are whole {p} in {m})",
        "microbatches",
        sorted(near),
    )


def interleaved_order(p: int, m: int, v: int, rank: int) -> Rows:
    group = m // rounds(p, m)
    forward = chunked(m * v, group, v, m, rank, p, backward=False)
    backward = chunked(m * v, group, v, m, rank, p, backward=True)
    return one_forward_one_backward(forward, backward, warmup=p - 1 - rank + (v - 1) * group, weight_lag=rank)


def interleaved_in_flight(p: object, m: object, v: object, r: object) -> np.ndarray:
    """((v-1)g + p)/v with groups of g microbatches, which is p where p divides m; the same on every rank."""
    pp, mm, vv = (np.asarray(x) for x in (p, m, v))
    group = mm // np.maximum(1, mm // pp)
    return np.minimum(mm, ((vv - 1) * group + pp) / vv) + 0.0 * np.asarray(r)


def interleaved_ends(p: object, m: object, v: object) -> tuple[np.ndarray, np.ndarray, int]:
    """The first stage holds a group, and of the next as many as a round of the ranks or, with several chunks between, all."""
    pp, mm = np.asarray(p), np.asarray(m)
    group = mm // np.maximum(1, mm // pp)
    return np.minimum(mm, group + np.where(np.asarray(v) > 2, group, pp)), np.minimum(mm, pp), 1


H1 = Schedule(
    name="zb-h1",
    aliases=("zb1p", "zbh1", "zero-bubble-h1"),
    doc="1F1B with a split backward at 1F1B's worst memory: the ramp is (p-1)(F+I-W).",
    source="Qi et al. 2024, arXiv:2401.10241, section 2.1; sail-sg zero-bubble",
    order=h1_order,
    period=lambda p: 1,
    splits_backward=True,
    in_flight=lambda p, m, v, r: np.minimum(m, p) + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (np.minimum(m, p), np.minimum(m, p), 1),
)
H2 = Schedule(
    name="zb-h2",
    aliases=("zb2p", "zbh2", "zero-bubble-h2"),
    doc="Twice the warm-up, split backward: no bubble inside a rank's own span, 2p - 1 microbatches held.",
    source="Qi et al. 2024, arXiv:2401.10241, section 2.2; sail-sg zero-bubble",
    order=h2_order,
    period=lambda p: 1,
    splits_backward=True,
    in_flight=lambda p, m, v, r: np.minimum(m, 2 * np.asarray(p) - 1) + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (np.minimum(m, 2 * np.asarray(p) - 1), np.minimum(m, 2 * np.asarray(p) - 1), 1),
)
INTERLEAVED = Schedule(
    name="interleaved-zb1p",
    aliases=("interleavedzerobubble", "interleaved-zero-bubble", "zb1p-interleaved"),
    doc="ZB-H1 with v chunks a rank: its ramp divided by v.",
    source="Qi et al. 2024, arXiv:2401.10241; PyTorch ScheduleInterleavedZeroBubble",
    order=interleaved_order,
    period=lambda p: p,
    rule=interleaved_rule,
    chunks="many",
    splits_backward=True,
    in_flight=interleaved_in_flight,
    ends=interleaved_ends,
    torch_class="InterleavedZeroBubble",
)
SCHEDULE = (H1, H2, INTERLEAVED)
