"""The terms of one plan's step for people: name, formula, numbers, seconds, source. They sum to the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .layer import BlockTime
from .parts import Part
from .pieces import StructurePieces

if TYPE_CHECKING:
    from .step import TimeTable


@dataclass(frozen=True)
class Term:
    """One summand: its formula, the numbers in it, its seconds in the step."""

    name: str
    formula: str
    numbers: Mapping[str, float]
    seconds: float
    source: str


REST = {
    "recompute": (
        "recomputed forward",
        "forward parts that the mode repeats x layers x micro-batches",
        "frameworks/*.py: checkpoint_stops_early, selective",
    ),
    "tp_comm": ("tensor-parallel traffic", "sum of messages of axis tp, less what hides", "catalog/links.toml; frameworks/*.py: hides_tp"),
    "dp_comm": (
        "data-parallel traffic",
        "seconds - (1 - residual) min(seconds, compute beside it)",
        "catalog/links.toml; frameworks/*.py: dp_residual",
    ),
    "pp_comm": ("messages between stages", "makespan with messages - makespan without", "schedules/replay.py"),
    "cp_comm": ("context-parallel traffic", "sum of messages of axis cp, less what hides behind attention", "catalog/links.toml"),
    "ep_comm": ("expert all-to-all", "sum of messages of axis ep, less what hides", "catalog/links.toml; frameworks/*.py: hides_ep"),
    "bubble": ("pipeline bubble", "makespan - work of the rank that works longest", "schedules/replay.py"),
    "optimizer": ("optimizer", "parameters of this rank x bytes each / memory bandwidth", "catalog/kernels.toml [optimizer]"),
    "offload": ("offload", "bytes over PCIe, host memory and disk", "catalog/kernels.toml [offload]"),
    "other": (
        "host, floor, jitter",
        "launches that outlast kernels + pauses + floor + jitter log2(nodes)",
        "catalog/kernels.toml [host] [step]",
    ),
}


def terms(table: TimeTable, i: int) -> list[Term]:
    """Plan i: every kind of kernel of every block on the rank that works longest, then what is left of the breakdown."""
    origin = table.origin
    row = origin.table.take(np.array([i]))
    structure = row.structures[int(row.structure[0])]
    part = StructurePieces(
        origin.model,
        origin.cluster,
        origin.job,
        structure,
        row,
        [],
        [],
        origin.settings.constants,
        origin.settings.rules[structure.framework],
        np.array([0]),
    )
    m = float(row.accumulation[0])
    scale = part.age * origin.settings.factor
    found: list[Term] = []
    for k, (block, _) in enumerate(origin.model.counts):
        found += _of_block(part.time_of(block), f"{block.name}: ", m * float(table.layers[k, i]), scale)
    for block, n in ((origin.model.embedding, table.ends[0, i]), (origin.model.head, table.ends[1, i])):
        found += _of_block(part.time_of(block, True), f"{block.name}: ", m * float(n), scale)
    computed = sum(t.seconds for t in found)
    rest = float(table.breakdown["compute"][i]) - computed
    if origin.model.mtp and rest > 0:
        found.append(Term("multi-token prediction", "its layers and one more pass through the head", {}, rest, "catalog/kernels.toml"))
    for key, (name, formula, source) in REST.items():
        seconds = float(table.breakdown[key][i])
        if seconds:
            found.append(Term(name, formula, _numbers(table, key, i), seconds, source))
    return found


def _of_block(time: BlockTime, prefix: str, times: float, scale: float) -> Iterator[Term]:
    for p in time.parts:
        seconds = float(p.forward[0] + p.backward[0]) * times * scale
        if seconds:
            yield Term(prefix + p.name, p.formula, {**_first(p), "times": times}, seconds, p.source)


def _first(p: Part) -> dict[str, float]:
    return {name: float(column[0]) for name, column in p.numbers.items()}


def _numbers(table: TimeTable, key: str, i: int) -> dict[str, float]:
    """Whole and exposed seconds of the messages behind a part."""
    axes = {"tp_comm": ("tp",), "cp_comm": ("cp",), "ep_comm": ("ep",), "dp_comm": ("dp", "dp_shard", "dp_replicate")}.get(key, ())
    whole = sum(float(s[i]) for m, s in zip(table.origin.messages, table.message_seconds) if m.axis in axes)
    return {"whole_s": whole} if axes else {}
