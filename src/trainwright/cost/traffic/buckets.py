"""Gradients in DistributedDataParallel's buckets, as its reducer rebuilds them after the first step: in the order in which backward makes them, a bucket is
closed by the tensor that fills it, the first at 1 MiB, later ones at 25 MiB.

Source: torch 2.13 torch/nn/parallel/distributed.py (`BucketCapacityConfig`), torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from ...spec.blocks import Weight
from ..distinct import distinct
from ..message import Axis, Phase
from ..table import IntColumn
from .columns import Case, chunks

MIB = 2**20
FIRST_BYTES, BUCKET_BYTES = MIB, 25 * MIB  # bucket_cap_mb; one that is given holds for the first as well


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


def backward_order(
    case: Case, elements: Callable[[Weight], IntColumn], copies: bool
) -> tuple[list[IntColumn], Callable[[int], list[list[int]]]]:
    """(what the answer depends on, for a row of the table: chunk by chunk of its rank, the `elements` of every trained tensor as backward makes their
    gradients: head first, embedding last, a block's from its last). `copies`: with the copy of the table that a tied head is in a pipeline."""
    model, table, rank = case.model, case.table, case.stage.rank
    blocks = {"head": model.head, "embedding": model.embedding, **{f"mtp {i}": b for i, b in enumerate(model.mtp)}, **model.blocks}
    sizes = {name: [elements(w) for w in reversed(case.trainable(b))] for name, b in blocks.items()}
    copy = [elements(w) for w in case.trainable(model.embedding) if w.shape[0] == model.vocab][:1] if model.tied and copies else []
    ends = (*(f"mtp {i}" for i in reversed(range(len(model.mtp)))), "head")

    def of(row: int) -> list[list[int]]:
        pp, found = int(table.pp[row]), []
        here = {name: [int(c[row]) for c in columns] for name, columns in sizes.items()}
        for layers, first, last in reversed(chunks(model, case.structure, pp, int(table.virtual_stages[row]), int(rank[row]))):
            names = [*(ends if last else ()), *(model.layers[i] for i in reversed(layers)), *(("embedding",) if first else ())]
            tied = [int(c[row]) for c in copy] if last and pp > 1 else []
            found.append([*tied, *chain(*(here[name] for name in names))])
        return found

    return [table.pp, table.virtual_stages, rank, *(c for some in sizes.values() for c in some)], of


def add_filled(
    case: Case,
    axis: Axis,
    phase: Phase,
    elements: Callable[[Weight], IntColumn],
    ranks: IntColumn,
    stride: IntColumn,
    overlaps: str,
    what: str,
    *,
    apart: bool,
) -> None:
    """All-reduces of the rank's gradients in the stored type, each chunk's in buckets of its own (`apart`: DDP wraps every stage) or all together, a tied table
    once: the first bucket, the last, and those between as so many of their mean size: bytes and calls are exact."""
    item = case.stored_bytes
    given = case.number("bucket_cap_mb", 0, 0) * MIB
    first, cap = given or FIRST_BYTES, given or BUCKET_BYTES
    depends, order = backward_order(case, elements, apart)
    some, where = distinct(depends)
    rows = np.zeros((5, len(some)), dtype=np.int64)
    for k, i in enumerate(some):
        lists = order(int(i))
        buckets = [b for sizes in (lists if apart else [chain(*lists)]) for b in filled((n * item for n in sizes), first, cap)]
        if not buckets:
            continue
        middle = max(len(buckets) - 2, 0)
        mean = sum(buckets[1:-1]) // max(middle, 1)
        rows[:, k] = buckets[0], mean, middle, sum(buckets[1:]) - mean * middle, len(buckets) > 1
    head, mean, middle, rest, several = rows[:, where]
    kinds = ((mean, middle, what), (head, 1, f"{what}, the first"), (rest, several, f"{what}, the last"))
    for size, calls, words in kinds:
        case.add(axis, "all_reduce", phase, size, calls, ranks, stride, overlaps=overlaps, what=words)
