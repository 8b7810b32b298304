"""ZB-V: two chunks a rank, down the ranks and back, with a split backward: no bubble at 1F1B's memory when F, I and W
cost the same.
"""

from __future__ import annotations

import numpy as np

from .actions import F, I, Rows, Schedule, W


def order(p: int, m: int, v: int, rank: int) -> Rows:
    """The published hand-made order, laid out for at least 2p - 1 microbatches; of fewer, the ones that do not exist
    are left out.
    """
    count = max(2 * p - 1, m)
    stage = (rank, 2 * p - 1 - rank)
    done = {(kind, chunk): 0 for kind in (F, I, W) for chunk in (0, 1)}
    rows: list[tuple[int, int, int, int]] = []

    def run(chunk: int, *kinds: int) -> None:
        for kind in kinds:
            rows.append((kind, stage[chunk], done[kind, chunk], 0))
            done[kind, chunk] += 1

    for _ in range(2 * (p - rank) - 1):  # fill down
        run(0, F)
    for _ in range(rank):  # the first microbatches come back
        run(1, F)
        run(0, F)
    for _ in range(p - rank):
        run(1, F, I, W)
    while done[F, 1] < done[F, 0] or done[F, 0] < count:  # steady: one F, I, W of each chunk
        if done[F, 0] < count:
            run(0, F)
        run(0, I, W)
        run(1, F, I, W)
    for _ in range(rank):  # drain: only input gradients are waited for
        run(0, I)
        run(1, I)
    for _ in range(p - rank):
        run(0, I, W)
    for chunk in (1, 0):
        while done[W, chunk] < done[I, chunk]:
            run(chunk, W)
    table = np.array(rows, dtype=np.int64)
    return table[table[:, 2] < m]


def in_flight(p: object, m: object, v: object, r: object) -> np.ndarray:
    """p from 2p - 1 microbatches on; of fewer, what is left of the 2p - r - 1 on the way down and the r + 1 on the way back."""
    pp, mm, rr = (np.asarray(x) for x in (p, m, r))
    return (np.minimum(mm, 2 * pp - rr - 1) + np.minimum(mm, rr + 1)) / 2


SCHEDULE = Schedule(
    name="zb-v",
    aliases=("zbv", "zbvzerobubble", "zero-bubble-v"),
    doc="Two chunks a rank in a V, split backward: zero span bubble at F = I = W and m >= 2p, p microbatches held.",
    source="Qi et al. 2024, arXiv:2401.10241, section 6; PyTorch ScheduleZBVZeroBubble",
    order=order,
    in_flight=in_flight,
    ends=lambda p, m, v: (np.minimum(m, 2 * np.asarray(p)), 1, 1),
    period=lambda p: 1,
    placement="v",
    chunks="two",
    splits_backward=True,
    torch_class="ZBVZeroBubble",
)
