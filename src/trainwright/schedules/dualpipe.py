"""DualPipe and DualPipeV: the forward of one direction runs together with the backward of the other, so that expert
all-to-all hides.

Both follow DeepSeek's eight steps. With `n` ranks to the turning point, a rank at distance `d` from the entrance and
`c` microbatches a direction, direction 0 being the one that enters here first: F0 x 2(n-d-1); F0 F1 x (d+1); I1 W F1
x (n-d-1); (F0 B1)(F1 B0) x (c-2n+d+1); B1 (F1 B0) x (n-d-1); B1 B0 x (d+1), from its middle with split backward; W I0
x (n-d-1); W x (d+1).
"""

from __future__ import annotations

import numpy as np

from .actions import B, F, I, Rows, Schedule, W, require


class _Steps:
    """Writes rows; knows the next microbatch of each direction and the weight gradients still owed, oldest first."""

    def __init__(self, stage: tuple[int, int], start: tuple[int, int]) -> None:
        self.stage = stage
        self.next_forward, self.next_backward = list(start), list(start)
        self.owed: list[tuple[int, int]] = []
        self.rows: list[tuple[int, int, int, int]] = []

    def forward(self, way: int, fused: int = 0) -> None:
        self.rows.append((F, self.stage[way], self.next_forward[way], fused))
        self.next_forward[way] += 1

    def backward(self, way: int, split: bool = False) -> None:
        at = (self.stage[way], self.next_backward[way])
        self.rows.append((I if split else B, *at, 0))
        self.next_backward[way] += 1
        if split:
            self.owed.append(at)

    def pair(self, forward: int, backward: int) -> None:
        self.forward(forward, fused=1)
        self.backward(backward)

    def weight(self) -> None:
        if self.owed:
            self.rows.append((W, *self.owed.pop(0), 0))


def eight_steps(n: int, d: int, count: int, stage: tuple[int, int], start: tuple[int, int]) -> Rows:
    """Rows of the rank at distance `d` of `n` from the entrance, `count` microbatches a direction, `start` the first
    microbatch of each direction.
    """
    s, left = _Steps(stage, start), n - d - 1
    for _ in range(2 * left):
        s.forward(0)
    for _ in range(d + 1):
        s.forward(0)
        s.forward(1)
    for _ in range(left):
        s.backward(1, split=True)
        s.weight()
        s.forward(1)
    for k in range(count - 2 * n + d + 1):
        if k == 0 and left == 0:  # the turning point does not overlap its first pair: the bubble is smaller
            s.forward(0)
            s.backward(1)
        else:
            s.pair(0, 1)
        s.pair(1, 0)
    for _ in range(left):
        s.backward(1)
        s.pair(1, 0)
    for k in range(2 * (d + 1)):
        s.backward(1 - k % 2, split=k >= d + 1)
    for _ in range(left):
        s.weight()
        s.backward(0, split=True)
    for _ in range(d + 1):
        s.weight()
    return np.array(s.rows, dtype=np.int64)


def order(p: int, m: int, v: int, rank: int) -> Rows:
    d = min(rank, p - 1 - rank)
    ways = (
        (rank, 0),
        (p - 1 - rank, m // 2),
    )  # (stage, first microbatch) of the direction down the ranks and of the one up
    near, far = ways if rank < p // 2 else ways[::-1]
    return eight_steps(p // 2, d, m // 2, (near[0], far[0]), (near[1], far[1]))


def v_order(p: int, m: int, v: int, rank: int) -> Rows:
    return eight_steps(p, rank, m, (rank, 2 * p - 1 - rank), (0, 0))


def rule(p: int, m: int, v: int) -> None:
    require(
        p % 2 == 0,
        f"dualpipe runs two directions over an even number of ranks, not {p}",
        "stages",
        [x for x in (p - 1, p + 1) if x > 0],
    )
    require(
        m % 2 == 0,
        f"dualpipe gives half of the microbatches to each direction; {m} is odd",
        "microbatches",
        [max(m + 1, 2 * p)],
    )
    require(m >= 2 * p, f"dualpipe needs {2 * p} microbatches or more, not {m}", "microbatches", [2 * p])


def v_rule(p: int, m: int, v: int) -> None:
    require(
        m >= 2 * p,
        f"dualpipe-v needs as many microbatches as there are stages, {2 * p}, not {m}",
        "microbatches",
        [2 * p],
    )


DUAL = Schedule(
    name="dualpipe",
    doc="Two directions over two copies of the weights, forward of one overlapped with backward of the other.",
    source="DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe",
    order=order,
    period=lambda p: 2,
    placement="bidirectional",
    rule=rule,
    splits_backward=True,
    overlaps=True,
    weight_copies=2,
    in_flight=lambda p, m, v, r: np.asarray(p) + 1.0 + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (p, 1, 1),
)
DUAL_V = Schedule(
    name="dualpipe-v",
    aliases=("dualpipev",),
    doc="DualPipe cut in half: two chunks a rank down and back, one copy of the weights.",
    source="github.com/deepseek-ai/DualPipe (DualPipeV); PyTorch ScheduleDualPipeV",
    order=v_order,
    period=lambda p: 1,
    placement="v",
    rule=v_rule,
    chunks="two",
    splits_backward=True,
    overlaps=True,
    in_flight=lambda p, m, v, r: np.asarray(p) + 0.5 + 0.0 * np.asarray(r),
    ends=lambda p, m, v: (2 * np.asarray(p), 1, 1),
    torch_class="DualPipeV",
)
SCHEDULE = (DUAL, DUAL_V)
