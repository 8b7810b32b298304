"""V-Half and V-Min: a V of two chunks a rank whose repeating pattern is chosen for a half or a third of 1F1B's
memory.

Qi et al. 2024, arXiv:2405.15362: lay the pattern's four passes (F down, F back, I back, I down) on a grid of unit
slots, one microbatch every six slots; then twice pull the passes of warm-up and drain forward where neither a
dependency nor the memory peak forbids it, and put the weight gradients into the free slots. The order is made at unit
cost and kept at any cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .actions import F, I, Rows, Schedule, W

PERIOD = 6  # two chunks of F, I and W
WEIGHT = 4  # pass number of the weight gradients; 0..3 are F down, F back, I back, I down


def half_pattern(p: int) -> np.ndarray:
    """Slots [p, 4] at which microbatch 0 passes each rank, V-Half."""
    r, gap = np.arange(p), 3 if p % 2 == 0 else 0
    return np.stack([2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2], axis=1)


def min_pattern(p: int) -> np.ndarray:
    """Slots [p, 4] at which microbatch 0 passes each rank, V-Min."""
    r, gap = np.arange(p), 2 if p % 3 == 0 else 0
    return np.stack([r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1], axis=1)


def place_weights(slots: np.ndarray) -> np.ndarray:
    """Free slots for a rank's weight gradients, as early as an input gradient is there to serve. `slots` [4, m] -> [2
    m], in order.
    """
    m, end = slots.shape[1], int(slots[:, -1].max())
    busy = np.zeros(end + 1 + 2 * m, bool)
    busy[slots.ravel()] = True
    ready = np.sort(slots[2:].ravel())
    free = np.flatnonzero(~busy)
    # the j-th weight takes the first free slot after its own gradient and after the slot of the weight before it
    first = np.searchsorted(free, ready, side="right")
    index = np.arange(2 * m)
    return free[np.maximum.accumulate(first - index) + index]


def peak(slots: np.ndarray, weights: np.ndarray) -> int:
    """Most chunk activations held at once."""
    at = np.concatenate([slots[:2].ravel(), weights])
    change = np.repeat([1, -1], [slots[:2].size, weights.size])
    return int(np.cumsum(change[np.lexsort((change, at))]).max())


def queue(slots: list[list[list[int]]]) -> list[tuple[int, int, int, int]]:
    """(slot, rank, pass, number) of everything, in the order of time. `slots` [rank][pass][n]."""
    return sorted((int(t), r, k, n) for r, rank in enumerate(slots) for k, passes in enumerate(rank) for n, t in enumerate(passes))


def earliest(slots: list[list[list[int]]], rank: int, kind: int, n: int) -> int:
    """First slot after everything that pass `kind` of microbatch n on `rank` must wait for."""
    before = [-1]
    if kind == WEIGHT:
        before.append(sorted(slots[rank][2] + slots[rank][3])[n])
    else:
        source = rank - 1 if kind in (0, 2) else rank + 1
        if 0 <= source < len(slots):
            before.append(slots[source][kind][n])
        if kind:
            before.append(slots[rank][kind - 1][n])
    if n:
        before.append(slots[rank][kind][n - 1])
    return max(before) + 1


def squeeze(slots: list[list[list[int]]]) -> list[list[list[int]]]:
    """Every pass starts at the first slot that its rank's order and its dependencies allow, at unit cost."""
    out = [[[0] * len(passes) for passes in rank] for rank in slots]
    free = [0] * len(slots)
    for _, r, k, n in queue(slots):
        start = max(free[r], 0 if k == WEIGHT else _arrival(out, r, k, n))
        out[r][k][n] = start
        free[r] = start + 1
    return out


def _arrival(out: list[list[list[int]]], r: int, k: int, n: int) -> int:
    source = r - 1 if k in (0, 2) else r + 1
    there = out[source][k][n] + 1 if 0 <= source < len(out) else 0
    return max(there, out[r][k - 1][n] + 1 if k else 0)


def pull_forward(slots: list[list[list[int]]], with_weights: bool) -> list[list[list[int]]]:
    """Moves passes of the warm-up (only `with_weights`) and of the drain to earlier free slots, as long as no rank's
    peak grows beyond today's largest.
    """
    p, m = len(slots), len(slots[0][0])
    if with_weights:
        slots = [[*rank, place_weights(np.array(rank)).tolist()] for rank in slots]
    arrays = [np.array(rank[:4]) for rank in slots]

    def peak_of(r: int) -> int:
        weights = np.array(slots[r][WEIGHT]) if with_weights else place_weights(arrays[r])
        return peak(arrays[r], weights[weights <= arrays[r][:, -1].max()] if not with_weights else weights)

    cap = max(peak_of(r) for r in range(p))
    taken: list[set[int]] = [set() for _ in range(p)]
    phase = 0
    for now, r, k, n in queue(slots):
        if k == 3 and r == 0 and phase == 0:
            phase = 1
        keep = phase == 1 or (phase == 0 and not with_weights)
        if phase == 1 and k == 0 and n == m - 1:
            phase = 2
        if not keep:
            _pull_one(slots, arrays, taken[r], (r, k, n, now), cap, peak_of)
        taken[r].add(slots[r][k][n])
    if not with_weights:
        slots = [[*rank, place_weights(np.array(rank)).tolist()] for rank in slots]
    return squeeze(slots)


def _pull_one(
    slots: list[list[list[int]]],
    arrays: list[np.ndarray],
    taken: set[int],
    what: tuple[int, int, int, int],
    cap: int,
    peak_of: Callable[[int], int],
) -> None:
    """Moves pass k of microbatch n on rank r, now in slot `now`, to the first free slot that keeps the peak."""
    r, k, n, now = what
    for slot in range(earliest(slots, r, k, n), now):
        if slot in taken:
            continue
        slots[r][k][n] = slot
        if k < WEIGHT:
            arrays[r][k, n] = slot
        if peak_of(r) <= cap:
            return
    slots[r][k][n] = now
    if k < WEIGHT:
        arrays[r][k, n] = now


def all_ranks(pattern: np.ndarray, m: int) -> list[Rows]:
    """Every rank's rows from a pattern [p, 4]."""
    p = len(pattern)
    slots = [[(t + PERIOD * np.arange(m)).tolist() for t in rank] for rank in pattern]
    slots = pull_forward(slots, with_weights=True)
    slots = pull_forward([rank[:4] for rank in slots], with_weights=False)
    return [_rows(np.array(rank[:4]), r, p) for r, rank in enumerate(slots)]


def _rows(slots: np.ndarray, rank: int, p: int) -> Rows:
    """Rows of a rank; a free slot serves the chunk that came back before the other one."""
    m = slots.shape[1]
    stages = (rank, 2 * p - 1 - rank, 2 * p - 1 - rank, rank)
    events = [(int(slots[k, n]), F if k < 2 else I, stages[k], n) for k in range(4) for n in range(m)]
    owed: dict[int, list[int]] = {stages[2]: [], stages[3]: []}
    weights = place_weights(slots).tolist()
    rows: list[tuple[int, int, int, int]] = []
    for _slot, kind, stage, n in sorted(events + [(t, W, -1, -1) for t in weights]):
        if kind == W:
            stage = next(s for s, waiting in owed.items() if waiting)
            n = owed[stage].pop(0)
        elif kind == I:
            owed[stage].append(n)
        rows.append((kind, stage, n, 0))
    return np.array(rows, dtype=np.int64)


def lengthened(rows: Rows, stage: int, more: int) -> Rows | None:
    """The rows with `more` further periods (a microbatch each) in their middle; None where the middle does not repeat itself."""
    passes = np.flatnonzero((rows[:, 0] == F) & (rows[:, 1] == stage))
    a, b, c = passes[len(passes) // 2 - 1 : len(passes) // 2 + 2].tolist()
    shift = np.array([0, 0, 1, 0])
    if c - b != PERIOD or b - a != PERIOD or not np.array_equal(rows[b:c], rows[a:b] + shift):
        return None
    added = rows[None, a:b] + np.arange(1, more + 1)[:, None, None] * shift
    return np.concatenate([rows[:b], added.reshape(-1, 4), rows[b:] + more * shift])


def long_ranks(pattern: np.ndarray, m: int) -> Sequence[Rows]:
    """`all_ranks`, by lengthening a shorter step where there are so many microbatches that its middle repeats itself."""
    short = 4 * len(pattern) + 4
    if m > short:
        rows = [lengthened(x, r, m - short) for r, x in enumerate(all_ranks(pattern, short))]
        if all(x is not None for x in rows):
            return [x for x in rows if x is not None]
    return all_ranks(pattern, m)


def half_ranks(p: int, m: int, v: int) -> Sequence[Rows]:
    return long_ranks(half_pattern(p), m)


def min_ranks(p: int, m: int, v: int) -> Sequence[Rows]:
    return long_ranks(min_pattern(p), m)


HALF = Schedule(
    name="v-half",
    aliases=("vhalf", "zb-v-half"),
    doc="A V of two chunks a rank at about half of 1F1B's memory, p/2 + 1, with a small bubble.",
    source="Qi et al. 2024, arXiv:2405.15362; sail-sg zero-bubble (mem-setup half)",
    order=lambda p, m, v, r: half_ranks(p, m, v)[r],
    all_ranks=half_ranks,
    reach=1,
    period=lambda p: 1,
    placement="v",
    chunks="two",
    splits_backward=True,
)
MIN = Schedule(
    name="v-min",
    aliases=("vmin", "zb-v-min"),
    doc="A V of two chunks a rank at about a third of 1F1B's memory, p/3 + 1; suffers when F, I and W differ.",
    source="Qi et al. 2024, arXiv:2405.15362; sail-sg zero-bubble (mem-setup min)",
    order=lambda p, m, v, r: min_ranks(p, m, v)[r],
    all_ranks=min_ranks,
    reach=1,
    period=lambda p: 1,
    placement="v",
    chunks="two",
    splits_backward=True,
)
SCHEDULE = (HALF, MIN)
