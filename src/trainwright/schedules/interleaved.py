"""Interleaved 1F1B: layers dealt round robin into v chunks a rank, which divides the ramp by v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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


def order(p: int, m: int, v: int, rank: int, group: int = 0) -> Rows:
    group = group or p
    forward = chunked(m * v, group, v, m, rank, p, backward=False)
    backward = chunked(m * v, group, v, m, rank, p, backward=True)
    return one_forward_one_backward(forward, backward, warmup=2 * (p - 1 - rank) + (v - 1) * group)


def in_flight(p: object, m: object, v: object, r: object, group: int = 0) -> np.ndarray:
    pp, mm, vv, rr = (np.asarray(x, float) for x in (p, m, v, r))
    return np.minimum(mm * vv, 2 * (pp - 1 - rr) + (vv - 1) * (group or pp) + 1) / vv


def group_rule(group: int) -> Callable[[int, int, int], None]:
    """Megatron's rule for `microbatch_group_size_per_vp_stage`: at least p, at most m, and no last group shorter than p."""

    def rule_of(p: int, m: int, v: int) -> None:
        legal = [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]
        near = sorted(sorted(legal, key=lambda g: abs(g - group))[:2])
        require(p <= m, f"a group needs {p} microbatches (one a rank), and there are {m}", "microbatches", [p])
        require(p <= group <= m, f"a group holds at least {p} microbatches (one a rank) and at most all {m}, not {group}", "group", near)
        require(group in legal, f"the last group would hold {m % group} microbatches, fewer than the {p} ranks", "group", near)

    return rule_of


def grouped(group: int) -> Schedule:
    """Interleaved 1F1B with groups of `group` microbatches instead of p: more in memory, and latency between chunks hidden."""
    return replace(
        SCHEDULE,
        order=partial(order, group=group),
        rule=group_rule(group),
        in_flight=partial(in_flight, group=group),
        ends=None,
        period=None,
        torch_class=None,
    )


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
    ends=lambda p, m, v: (np.minimum(m, 2 * np.asarray(p)), 1, 1),
    torch_class="Interleaved1F1B",
)
