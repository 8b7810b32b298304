"""Seconds of every message of a table: each different (size, group, distance) priced once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..spec.cluster import ClusterSpec
from .collectives import collective_seconds
from .message import Message
from .table import Column, PlanTable


def price(cluster: ClusterSpec, table: PlanTable, messages: Sequence[Message]) -> list[Column]:
    """Seconds a step that one rank spends in each message, hidden or not."""
    if not messages:
        return []
    keys = [
        _key(table, ("micro_batch_size", "tp", "cp", "ep", "etp")),
        _key(table, ("tp", "cp", "pp", "ep", "etp", "dp_shard", "dp_replicate", "virtual_stages")),
    ]
    return [_one(cluster, keys, m) for m in messages]


def _key(table: PlanTable, names: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(first plan of each different combination of these columns, which combination each plan has)."""
    code = np.zeros(len(table), dtype=np.int64)
    for name in names:
        column = getattr(table, name)
        values, place = np.unique(column, return_inverse=True)
        code = code * len(values) + place
    _, first, where = np.unique(code, return_index=True, return_inverse=True)
    return first, where


def _one(cluster: ClusterSpec, keys: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]], m: Message) -> Column:
    for first, where in keys:
        columns = (m.bytes_per_call, m.ranks, m.stride)
        if all(bool((c == c[first][where]).all()) for c in columns):
            size, ranks, stride = (c[first] for c in columns)
            return np.asarray(collective_seconds(m.collective, size, cluster, ranks, stride))[where] * m.calls
    active = m.calls > 0
    seconds = np.zeros(len(m.calls))
    seconds[active] = (
        collective_seconds(m.collective, m.bytes_per_call[active], cluster, m.ranks[active], m.stride[active]) * m.calls[active]
    )
    return seconds
