"""What memory is made of, for every plan of a table: columns of whole bytes, and for one row the terms and the timeline behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .table import IntColumn

STATES = ("parameters", "master_weights", "gradients", "optimizer")
PARTS = (*STATES, "activations", "logits", "communication_buffers", "framework")
PHASES = ("load", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Term:
    """One line of an explanation: `bytes` = `formula` with `numbers` put in; `source` says where the rule is from."""

    name: str
    part: str  # one of PARTS
    formula: str
    numbers: str
    bytes: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes by part right after an event of a step. `phase` is one of PHASES."""

    name: str
    phase: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class Detail(Protocol):
    """What an engine can say about one row of the table that it made."""

    def terms(self, row: int) -> list[Term]:
        """The terms of the peak; their bytes sum to the peak."""

    def timeline(self, row: int) -> list[Moment]:
        """The moments of a step in order."""


@dataclass(frozen=True)
class MemoryTable:
    """All columns are int64, one entry a plan, in bytes unless named otherwise; always of the worst pipeline rank.

    * `peak_bytes` is the sum of `breakdown` (keys `PARTS`) at the worst moment. An engine leaves `framework` zero and `reserved_bytes`,
      `device_bytes`, host and disk to `cost.device`; the table that `cost.memory` returns has them filled.
    * `states` (keys `STATES`): what the rank owns between backward and the optimizer step.
    * `saved_bytes`: what the forward pass of one micro-batch leaves behind for backward.
    * `phases` (keys `PHASES`): the largest number of live bytes in each phase, `framework` left out.
    * `peak_moment[i]` indexes `moments`, `peak_phase[i]` indexes `PHASES`.
    * `details[detail[i]]` answers for row `detail_row[i]` of its own table.
    """

    peak_bytes: IntColumn
    breakdown: Mapping[str, IntColumn]
    states: Mapping[str, IntColumn]
    saved_bytes: IntColumn
    pipeline_rank: IntColumn
    phases: Mapping[str, IntColumn]
    peak_phase: IntColumn
    peak_moment: IntColumn
    moments: tuple[str, ...]
    reserved_bytes: IntColumn
    device_bytes: IntColumn
    host_bytes_per_node: IntColumn
    nvme_bytes_per_node: IntColumn
    details: tuple[Detail, ...]
    detail: IntColumn
    detail_row: IntColumn
    extra: Mapping[str, IntColumn] = field(default_factory=dict)  # what an engine tells `cost.device`, e.g. the largest all-gather buffer

    @classmethod
    def build(
        cls,
        n: int,
        breakdown: Mapping[str, IntColumn],
        states: Mapping[str, IntColumn],
        saved_bytes: IntColumn,
        phases: Mapping[str, IntColumn],
        *,
        detail: Detail,
        peak_phase: IntColumn | None = None,
        peak_moment: IntColumn | None = None,
        moments: tuple[str, ...] = ("",),
        pipeline_rank: IntColumn | None = None,
        extra: Mapping[str, IntColumn] | None = None,
    ) -> MemoryTable:
        """A table from what an engine knows; parts, states and phases that are left out are zero, peak_bytes is the sum of the parts."""

        def filled(given: Mapping[str, IntColumn], names: Sequence[str]) -> dict[str, IntColumn]:
            return {k: np.broadcast_to(np.asarray(given.get(k, 0), dtype=np.int64), (n,)) for k in names}

        def column(given: IntColumn | None) -> IntColumn:
            return np.zeros(n, np.int64) if given is None else np.asarray(given, dtype=np.int64)

        parts = filled(breakdown, PARTS)
        peak: IntColumn = np.stack([parts[k] for k in PARTS]).sum(axis=0)
        return cls(
            peak_bytes=peak,
            breakdown=parts,
            states=filled(states, STATES),
            saved_bytes=np.asarray(saved_bytes, dtype=np.int64),
            pipeline_rank=column(pipeline_rank),
            phases=filled(phases, PHASES),
            peak_phase=column(peak_phase),
            peak_moment=column(peak_moment),
            moments=moments,
            reserved_bytes=column(None),
            device_bytes=column(None),
            host_bytes_per_node=column(None),
            nvme_bytes_per_node=column(None),
            details=(detail,),
            detail=column(None),
            detail_row=np.arange(n, dtype=np.int64),
            extra=dict(extra or {}),
        )

    def __len__(self) -> int:
        return len(self.peak_bytes)

    def terms(self, i: int) -> list[Term]:
        """The terms of plan i's peak, `framework` included; their bytes sum to ``peak_bytes[i]``."""
        found = self.details[int(self.detail[i])].terms(int(self.detail_row[i]))
        framework = int(self.breakdown["framework"][i])
        if framework and not any(t.part == "framework" for t in found):
            found = [*found, Term("context, libraries, workspaces", "framework", "framework", f"{framework:,}", framework, "cost.device")]
        return found

    def timeline(self, i: int) -> list[Moment]:
        """The moments of plan i's step in order, tensors only (`framework` left out)."""
        return self.details[int(self.detail[i])].timeline(int(self.detail_row[i]))

    def moment(self, i: int) -> str:
        """The name of the peak's moment."""
        return self.moments[int(self.peak_moment[i])]

    def with_columns(self, **columns: Any) -> MemoryTable:
        return replace(self, **columns)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> MemoryTable:
        """The rows of an index or mask."""
        return replace(self, **{name: _map(value, lambda c: c[rows]) for name, value in self._columns().items()})

    def _columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("moments", "details")}


def _map(value: Any, change: Any) -> Any:
    return {k: change(v) for k, v in value.items()} if isinstance(value, Mapping) else change(value)


def concatenate(tables: Sequence[MemoryTable]) -> MemoryTable:
    """The rows of all tables, in order. `extra` keeps every key; rows of a table without it get zero."""
    moments: dict[str, int] = {}
    details: list[Detail] = []
    shifted = []
    extras = sorted({k for t in tables for k in t.extra})
    for t in tables:
        recode = np.array([moments.setdefault(m, len(moments)) for m in t.moments], dtype=np.int64)
        extra = {k: t.extra.get(k, np.zeros(len(t), np.int64)) for k in extras}
        shifted.append(replace(t, peak_moment=recode[t.peak_moment], detail=t.detail + len(details), extra=extra)._columns())
        details += t.details
    columns: dict[str, Any] = {}
    for name, value in shifted[0].items():
        if isinstance(value, Mapping):
            columns[name] = {k: np.concatenate([s[name][k] for s in shifted]) for k in value}
        else:
            columns[name] = np.concatenate([s[name] for s in shifted])
    return MemoryTable(**columns, moments=tuple(moments), details=tuple(details))


def scatter(tables: Sequence[MemoryTable], rows: Sequence[NDArray[np.intp]]) -> MemoryTable:
    """One table in which row ``rows[k][j]`` is row j of ``tables[k]``; the rows together are 0 .. n-1, each once."""
    if len(tables) == 1 and np.array_equal(rows[0], np.arange(len(tables[0]))):
        return tables[0]
    joined = concatenate(tables)
    back = np.empty(len(joined), dtype=np.intp)
    back[np.concatenate(rows)] = np.arange(len(joined))
    return joined.take(back)
