"""What a rank sends in a step, as rows of columns. `cost.traffic` makes them, `cost.collectives` prices them, the estimate lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .table import IntColumn

Axis = Literal["dp_shard", "dp_replicate", "dp", "tp", "pp", "cp", "ep"]
Phase = Literal["forward", "backward", "reduce", "optimizer", "loss", "recompute"]


@dataclass(frozen=True)
class Message:
    """One kind of collective for every plan of a table; all columns have one entry a plan.

    `bytes_per_call` is the whole message as the contract means it (what every rank ends with for all_reduce, all_gather, broadcast; starts with
    for reduce_scatter; sends in total for all_to_all, send_recv); `calls` counts calls a step of one rank (0 where the plan has none); `ranks` is
    the size of the group and `stride` the distance of its members in global ranks, from which its nodes follow.
    `overlaps` says behind which work the framework hides it: "" (exposed), "layer" (next layer's compute), "backward", "product" (inside a
    matrix product), "pipeline".
    """

    axis: Axis
    collective: str
    phase: Phase
    bytes_per_call: IntColumn
    calls: IntColumn
    ranks: IntColumn
    stride: IntColumn
    overlaps: str = ""
    what: str = ""  # for people: "sharded parameters of a layer", ...
