"""The span of a pipeline: a lower bound over columns for the screen, a replay of the action lists for the exact pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..schedules import SCHEDULES
from ..schedules.makespans import makespans
from ..spec.model import ModelSpec
from .stages import layers_per_stage
from .table import Column

MAX_ACTIONS = 40_000  # of a replay; longer steps are extended by the slope of their steady state


@dataclass(frozen=True)
class Stages:
    """What stands on each of pp x virtual_stages stages: `counts` [stages, kinds] layers of each block, `rank` [stages]; the first stage has the
    embedding, the last one the head. `bidirectional`: DualPipe keeps every stage on two ranks, each runs it for half of the micro-batches.

    `classes` are the different ranks: layers of each kind, ends (embedding, head), and what the first chunk of all ranks before it holds, of the
    last of its kind; columns (kinds..., embedding, head).
    """

    counts: NDArray[np.float64]
    rank: NDArray[np.int64]
    pp: int
    bidirectional: bool = False

    @property
    def stages(self) -> int:
        return len(self.counts)

    @cached_property
    def classes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(work [classes, kinds + 2], ramp [classes, kinds + 2])."""
        ends = np.zeros((self.stages, 2))
        ends[0, 0] = ends[-1, 1] = 1.0
        each = np.hstack([self.counts, ends])
        work = np.zeros((self.pp, each.shape[1]))
        np.add.at(work, self.rank, each)
        if self.bidirectional:
            work = 0.5 * (work + work[::-1])
        first = each[: self.pp]
        ramp = np.cumsum(first, axis=0) - first
        last_of: dict[tuple[float, ...], int] = {tuple(row): r for r, row in enumerate(work.tolist())}
        chosen = sorted(last_of.values())
        return work[chosen], ramp[chosen]


def schedule_of(name: str, virtual_stages: int) -> str:
    """The schedule that runs: an interleaved one with a single chunk is 1F1B."""
    return "1f1b" if virtual_stages == 1 and SCHEDULES[name].chunks == "many" else name


@lru_cache(maxsize=1024)
def _kinds(model: ModelSpec) -> NDArray[np.float64]:
    names = [block.name for block, _ in model.counts]
    order = {block: i for i, (block, _) in enumerate(model.counts)}
    index = [order[model.blocks[layer]] for layer in model.layers]
    hot = np.zeros((len(index) + 1, len(names)))
    hot[np.arange(1, len(index) + 1), index] = 1.0
    return hot.cumsum(axis=0)


@lru_cache(maxsize=1024)
def stages_of(model: ModelSpec, pp: int, virtual_stages: int, schedule: str, given: tuple[int, ...] | None, even: bool) -> Stages:
    """Layers of each kind on each stage, and the rank of each stage."""
    total = pp * virtual_stages
    per_stage = layers_per_stage(model.num_layers, total, given, even)
    ends = np.concatenate([[0], np.cumsum(per_stage)])
    until = _kinds(model)
    stage = np.arange(total)
    rank = stage % pp
    placement = SCHEDULES[schedule_of(schedule, virtual_stages)].placement
    if placement == "v":
        rank = np.where((stage // pp) % 2 == 1, pp - 1 - rank, rank)
    return Stages(until[ends[1:]] - until[ends[:-1]], rank, pp, placement == "bidirectional")


def bound(
    stages: Stages, forward: NDArray[np.float64], backward: NDArray[np.float64], chunk_s: Column, microbatches: Column, unsplit: bool
) -> tuple[Column, NDArray[np.intp]]:
    """(seconds that no order of the actions can beat, the class of ranks that sets them).

    `forward` and `backward` are [kinds + 2, plans] seconds of a layer of each kind, of embedding and head; `chunk_s` is paid for each chunk besides.
    A rank works for `microbatches` times what stands on it; before its first action the first micro-batch has passed the first chunk of the ranks
    before it, and where backward is not split its last action is followed by the backward of those same chunks. The largest over the ranks.
    """
    work, ramp = stages.classes
    both = forward + backward
    if stages.bidirectional or stages.pp == 1:
        ramp = np.zeros_like(ramp)
    best = np.zeros(forward.shape[1])
    which = np.zeros(forward.shape[1], dtype=np.intp)
    chunks = stages.stages // stages.pp
    for c, (w, r) in enumerate(zip(work, ramp)):
        seconds = (_dot(w, both) + chunk_s * chunks) * microbatches
        if r.any():
            seconds = seconds + _dot(r, both if unsplit else forward)
        better = seconds > best
        which[better] = c
        np.maximum(best, seconds, out=best)
    return best, which


def _dot(weights: NDArray[np.float64], columns: NDArray[np.float64]) -> Column:
    """weights @ columns, in the same order for every number of plans, so that a plan's time does not depend on its table."""
    total = np.zeros(columns.shape[1])
    for w, column in zip(weights.tolist(), columns):
        if w:
            total += w * column
    return total


def replayed(
    schedule: str,
    stages: Stages,
    microbatches: int,
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    weight: NDArray[np.float64],
    p2p_s: Column,
    blocking: bool,
) -> Column:
    """Makespans in seconds of the schedule with these costs of each stage [stages, plans]; `backward` is the input gradient, `weight` the weight gradient."""
    chunks = stages.stages // stages.pp
    name = schedule_of(schedule, chunks)

    def run(m: int) -> Column:
        return makespans(name, stages.pp, m, chunks, forward, backward, weight, p2p_s, blocking and name in ("1f1b", "gpipe"))

    group = 2 * stages.pp
    if 2 * stages.stages * microbatches <= MAX_ACTIONS or microbatches <= 4 * group:
        return run(microbatches)
    short = 2 * group + microbatches % group
    start = run(short)
    busy = np.zeros((stages.pp, forward.shape[1]))
    np.add.at(busy, stages.rank, forward + backward + weight)
    slope = np.maximum((run(short + group) - start) / group, busy.max(axis=0))
    return start + slope * (microbatches - short)
