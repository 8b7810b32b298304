"""Context parallelism: ring attention, and why the cut is a zigzag."""

from __future__ import annotations

from typing import Annotated

from ..check import compare
from ..context import causal_pairs, positions_of
from ..layout import Layout
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def context_parallel(
    ranks: Ranks = 4,
    batch: Batch = 2,
    length: Length = 24,
    steps: Steps = 5,
    balanced: Annotated[bool, "Rank c has pieces c and 2n-1-c of 2n (else contiguous pieces)."] = True,
    kind: Annotated[str, "ring, allgather or ulysses."] = "ring",
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """One sequence over N ranks: keys and values go round the ring, an online softmax joins the blocks.

    Or every rank gathers them all (allgather), or all-to-alls turn tokens into heads (ulysses).
    """
    check_sizes(ranks, batch, length, steps)
    c = compare(model(model_name), Layout(cp=ranks, cp_balance=balanced, cp_kind=kind), batch=batch, length=length, steps=steps, seed=seed)
    table, equal = bytes_table(c)
    work, times = [], {}
    for name, flag in (("zigzag", True), ("contiguous", False)):
        pairs = causal_pairs(length, ranks, flag)
        times[name] = sum(max(step) for step in pairs)
        for step, row in enumerate(pairs):
            work.append({"cut": name, "step": step, **{f"rank {r}": n for r, n in enumerate(row)}, "the step takes": max(row)})
    total = length * (length + 1) // 2
    where = [{"rank": r, "positions": _ranges(p.tolist())} for r, p in enumerate(positions_of(length, ranks, balanced))]
    return Report(
        f"Context parallel on {ranks} ranks",
        [Table("Who has which tokens", where), against_one_device(c), Table("Query-key pairs of each ring step", work), table],
        {**figures(c, equal), "pairs": total, "pairs_in_time": times, "ideal": total / ranks},
        [
            f"{total} causal pairs; {ranks} ranks need at least {total / ranks:.0f} each. "
            f"The zigzag takes {times['zigzag']}, contiguous pieces {times['contiguous']}.",
            {
                "ring": "Keys and values travel n-1 times forward and backward, their gradients n times, so that they end where they began.",
                "allgather": "Keys and values are gathered forward and again backward, their gradients reduce-scattered.",
                "ulysses": "Four all-to-alls forward and four backward, whose bytes fall as 1/n; no more ranks than key-value heads.",
            }[kind],
        ],
    )


def _ranges(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in found)


STUDY = Study("context-parallel", context_parallel, "trainwright simulate context-parallel --ranks 4 --length 23", ("cp", "ring-attention"))
