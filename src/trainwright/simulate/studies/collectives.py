"""Collectives moved step by step: every byte and message against the formula."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from ..collectives import Array, bounds, expected_bytes, expected_steps
from ..model import generator
from ..report import Report, Table
from ..world import Group, Rank, World
from . import Study
from .common import Ranks, Seed, limited

CASES = (
    ("all_reduce", "ring"),
    ("all_reduce", "tree"),
    ("all_gather", "ring"),
    ("reduce_scatter", "ring"),
    ("all_to_all", "pairwise"),
    ("broadcast", "tree"),
    ("send_recv", "direct"),
)


def perform(kind: str, algorithm: str, group: Group, mine: Array) -> Array:
    """One collective of `mine` (the whole message of this member)."""
    pieces = [mine[lo:hi] for lo, hi in bounds(mine.size, group.size)]
    if kind == "all_reduce":
        return group.all_reduce(mine, "study", algorithm)
    if kind == "all_gather":
        return np.concatenate(group.all_gather(pieces[group.me], "study"))
    if kind == "reduce_scatter":
        return group.reduce_scatter(pieces, "study")
    if kind == "all_to_all":
        return np.concatenate(group.all_to_all(pieces, "study"))
    if kind == "broadcast":
        return group.broadcast(mine if group.me == 0 else None, 0, "study")
    if group.me == 0 and group.size > 1:
        group.rank.send(group.ranks[1], mine, tag="study")
    return group.rank.receive(group.ranks[0]) if group.me == 1 else mine


def right_answer(kind: str, messages: list[Array], me: int) -> Array:
    """What member `me` must end with."""
    places = bounds(messages[0].size, len(messages))
    lo, hi = places[me]
    if kind == "all_reduce":
        return np.sum(messages, axis=0)
    if kind == "reduce_scatter":
        return np.sum(messages, axis=0)[lo:hi]
    if kind == "all_gather":
        return np.concatenate([m[a:b] for m, (a, b) in zip(messages, places)])
    if kind == "all_to_all":
        return np.concatenate([m[lo:hi] for m in messages])
    return messages[0] if kind == "broadcast" or me == 1 else messages[me]


def _case(kind: str, algorithm: str, messages: list[Array]) -> dict[str, Any]:
    """One collective of these messages, one a rank: result, bytes and messages against what they should be."""
    ranks, elements = len(messages), messages[0].size
    world = World(ranks)

    def program(rank: Rank) -> Array:
        return perform(kind, algorithm, rank.group(range(ranks)), messages[rank.index])

    results = world.run(program)
    sent = world.traffic.bytes_by_rank()
    counted = [sent.get(r, 0) for r in range(ranks)]
    formula = [expected_bytes(kind, elements, 8, ranks, r, algorithm) for r in range(ranks)]
    return {
        "collective": kind.replace("_", "-"),
        "algorithm": algorithm,
        "steps": expected_steps(kind, ranks, algorithm),
        "messages": world.traffic.messages,
        "rank 0 sends (bytes)": counted[0],
        "all ranks": sum(counted),
        "formula, all ranks": sum(formula),
        "of the message, most of a rank": max(counted) / (8 * elements),
        "equal on every rank": "yes" if counted == formula else "NO",
        "largest error": max(float(np.abs(got - right_answer(kind, messages, me)).max(initial=0.0)) for me, got in enumerate(results)),
    }


def collectives(
    ranks: Ranks = 8,
    elements: Annotated[int, "Elements of the message (8 bytes each); need not divide."] = 1000,
    seed: Seed = 0,
) -> Report:
    """All-reduce by ring and tree, all-gather, reduce-scatter, all-to-all, broadcast, send and receive: real arrays, step by step, counted."""
    limited(ranks, 64, "ranks")
    limited(elements, 2**22 // ranks, "elements")
    random = generator(seed)
    messages = [random.standard_normal(elements) for _ in range(ranks)]
    rows = [_case(kind, algorithm, messages) for kind, algorithm in CASES]
    return Report(
        f"Collectives of {8 * elements:,} bytes on {ranks} ranks",
        [Table("Counted against the formula", rows)],
        {
            "rows": rows,
            "bytes_equal_formula": all(r["equal on every rank"] == "yes" for r in rows),
            "largest_error": max(r["largest error"] for r in rows),
        },
        [
            "A ring all-reduce sends 2 (n-1)/n of the message from every rank in 2 (n-1) steps.",
            "A tree sends as much in sum, in 2 log2 n steps: better for small messages.",
            "A reduce-scatter and an all-gather are its two halves.",
        ],
    )


STUDY = Study("collectives", collectives, "trainwright simulate collectives --ranks 8 --elements 1001")
