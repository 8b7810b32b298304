"""What the host spends on sending where it is the device that computes: hooks and copies of FSDP2's groups, DTensor around split products, blocks of a cut
attention. `trainwright calibrate` measures each apart (`train.measure_host`); a GPU's host runs ahead of its kernels, and `cost.pieces` prices its launches.

Each is a line, ``calls x (seconds + bytes x seconds a byte)``, on the calls and bytes of the plan's own messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..frameworks import FRAMEWORKS
from ..spec.blocks import Block
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .message import Message
from .overlap import DATA
from .table import Column, PlanTable
from .traffic.columns import column_inputs, row_products

Law = Mapping[str, Any]


def sending_seconds(
    law: Law,
    model: ModelSpec,
    structure: Structure,
    table: PlanTable,
    messages: Sequence[Message],
    layers: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    again: Sequence[Column],
) -> dict[str, Column]:
    """Seconds a step on the rank that `messages`, `layers` [kinds, plans] and `ends` [2, plans] describe, by name; empty where nothing was measured.

    `again`: of each kind of layer, the share of its forward pass that is recomputed.
    """
    found: dict[str, Column] = {}

    def add(name: str, seconds: Column) -> None:
        found[name] = found.get(name, np.zeros(len(table))) + seconds

    for m in messages:
        joined = m.ranks > 1
        for name, line, times in _lines(law, m, structure, table):
            add(name, np.where(joined, times * m.calls * (line[0] + line[1] * m.bytes_per_call), 0.0))
    split, wrapped = table.tp > 1, "groups" in found
    if "product_s" in law.get("tp", {}) and split.any():
        share = [1.0 + a / 3.0 for a in again]  # a forward pass is one of three products
        count = sum((n * s * _split(block) for n, s, (block, _) in zip(layers, share, model.counts)), ends[1] * _split(model.head))
        add("split products", np.where(split, law["tp"]["product_s"] * table.accumulation * count, 0.0))
    if wrapped or split.any():
        blocks = [*(b for b, _ in model.counts), model.embedding, model.head]
        tensors = sum(n * sum(len(op.weights) for op in b.ops) for n, b in zip([*layers, *ends], blocks))
        add("updates of split tensors", np.where(split | wrapped, law.get("update_s", 0.0) * tensors, 0.0))
    return found


def _split(block: Block) -> int:
    return sum(len(ops) for _, ops in column_inputs(block)) + len(row_products(block))


def _lines(law: Law, m: Message, structure: Structure, table: PlanTable) -> Iterator[tuple[str, Sequence[float], Column | float]]:
    """(name, line, times a call) of what surrounds a message."""
    if m.axis in ("dp", "dp_shard") and m.phase == "reduce" and structure.framework == "fsdp2":
        group = law.get("groups", {}).get(structure.sharding)
        if group:
            yield "groups", group["reduce"], 1.0
            reduces_each = structure.sharding != "none" and not FRAMEWORKS["fsdp2"].memory.puts_off("", structure)
            yield "groups", group["each"], 1.0 if reduces_each else table.accumulation.astype(float)
    elif m.axis not in DATA and m.phase != "optimizer":
        line = law.get(m.axis, {}).get(m.collective)
        if line:
            yield "messages", line, 1.0
