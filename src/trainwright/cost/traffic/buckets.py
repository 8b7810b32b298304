"""Gradients in DistributedDataParallel's buckets, as its reducer rebuilds them after the first step: in the order in which backward makes them, a bucket is
closed by the tensor that fills it, the first at 1 MiB, later ones at 25 MiB.

Source: torch 2.13 torch/nn/parallel/distributed.py (`BucketCapacityConfig`), torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...spec.blocks import Weight
from ..distinct import distinct
from ..message import Axis, Phase
from ..table import IntColumn
from .columns import Case

MIB = 2**20
FIRST_BYTES, BUCKET_BYTES = MIB, 25 * MIB  # bucket_cap_mb; one that is given holds for the first as well
Run = tuple[Sequence[IntColumn], IntColumn]  # elements of some tensors, and how often they repeat


def filled(sizes: Iterable[int], first: int, cap: int) -> list[int]:
    """Sizes of tensors in their order -> those of the buckets they fill."""
    found: list[int] = []
    open_bytes, limit = 0, first
    for size in sizes:
        open_bytes += size
        if open_bytes >= limit:
            found.append(open_bytes)
            open_bytes, limit = 0, cap
    return [*found, open_bytes] if open_bytes else found


def backward_order(case: Case, elements: Callable[[Weight], IntColumn]) -> list[Run]:
    """The rank's trained tensors, `elements` of each, as backward makes their gradients: head first, embedding last, a block's from its last. Kinds of
    layers come one after the other."""
    model, stage = case.model, case.stage
    ends = [*((block, stage.head) for block in reversed(model.mtp)), (model.head, stage.head)]
    layers = [(model.blocks[name], count) for name, count in reversed(stage.layers.items())]
    blocks = [*ends, *layers, (model.embedding, stage.embedding)]
    return [([elements(w) for w in reversed(case.trainable(block))], count) for block, count in blocks]


def add_filled(
    case: Case, axis: Axis, phase: Phase, runs: list[Run], ranks: IntColumn, stride: IntColumn, overlaps: str, what: str
) -> None:
    """All-reduces of `runs` in the stored type: the first bucket, the last, and those between as so many of their mean size: bytes and calls are exact."""
    item = case.stored_bytes
    given = case.number("bucket_cap_mb", 0, 0) * MIB
    first, cap = given or FIRST_BYTES, given or BUCKET_BYTES
    some, where = distinct([c for sizes, count in runs for c in (*sizes, count)])
    rows = np.zeros((5, len(some)), dtype=np.int64)
    for k, i in enumerate(some):
        sizes = (int(s[i]) * item for tensors, count in runs for _ in range(int(count[i])) for s in tensors)
        buckets = filled(sizes, first, cap)
        if not buckets:
            continue
        middle = max(len(buckets) - 2, 0)
        mean = sum(buckets[1:-1]) // max(middle, 1)
        rows[:, k] = buckets[0], mean, middle, sum(buckets[1:]) - mean * middle, len(buckets) > 1
    head, mean, middle, rest, several = rows[:, where]
    kinds = ((mean, middle, what), (head, 1, f"{what}, the first"), (rest, several, f"{what}, the last"))
    for size, calls, words in kinds:
        case.add(axis, "all_reduce", phase, size, calls, ranks, stride, overlaps=overlaps, what=words)
