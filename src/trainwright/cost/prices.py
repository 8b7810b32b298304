"""Seconds of every message of a table: each different (size, group, distance) priced once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..spec.cluster import ClusterSpec
from .collectives import collective_seconds
from .distinct import distinct
from .message import Message
from .table import Column, IntColumn, PlanTable, Rows


def price(cluster: ClusterSpec, table: PlanTable, messages: Sequence[Message]) -> list[Column]:
    """Seconds a step that one rank spends in each message, hidden or not."""
    if not messages:
        return []
    layer = (table.micro_batch_size, table.tp, table.cp, table.ep, table.etp)
    state = (table.tp, table.cp, table.pp, table.ep, table.etp, table.dp_shard, table.dp_replicate, table.virtual_stages)
    inside, outside = distinct(layer), distinct(state)
    keys = {"tp": [inside], "cp": [inside], "ep": [inside, outside], "pp": []}
    return [_one(cluster, keys.get(m.axis, [outside]), m) for m in messages]


def take(m: Message, rows: Rows) -> Message:
    """The message of some plans."""
    return replace(m, bytes_per_call=m.bytes_per_call[rows], calls=m.calls[rows], ranks=m.ranks[rows], stride=m.stride[rows])


def _one(cluster: ClusterSpec, keys: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]], m: Message) -> Column:
    code = _mixed(m.bytes_per_call, m.ranks, m.stride)
    for first, where in keys:
        if bool((code == code[first][where]).all()):
            size, ranks, stride = (c[first] for c in (m.bytes_per_call, m.ranks, m.stride))
            return np.asarray(collective_seconds(m.collective, size, cluster, ranks, stride))[where] * m.calls
    active = m.calls > 0
    seconds = np.zeros(len(m.calls))
    seconds[active] = (
        collective_seconds(m.collective, m.bytes_per_call[active], cluster, m.ranks[active], m.stride[active]) * m.calls[active]
    )
    return seconds


def _mixed(size: IntColumn, ranks: IntColumn, stride: IntColumn) -> IntColumn:
    """One number that differs where any of three does (odd multipliers modulo 2^64)."""
    return size + ranks * 6364136223846793005 + stride * 1442695040888963407
