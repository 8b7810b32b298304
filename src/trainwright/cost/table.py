"""A table of plans: one NumPy column a number, one small integer a row that names its structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..spec.plan import NUMBERS, ParallelPlan, Structure

IntColumn = NDArray[np.int64]
Column = NDArray[np.float64]
Rows = NDArray[np.intp] | slice  # of a table, by number
COUNTED = 2**16  # entries that `different` counts instead of sorting


@dataclass(frozen=True)
class PlanTable:
    """`structures[structure[i]]` and the i-th entry of each column are plan i. All columns are int64 of the same length."""

    structures: tuple[Structure, ...]
    structure: IntColumn
    dp_replicate: IntColumn
    dp_shard: IntColumn
    tp: IntColumn
    pp: IntColumn
    cp: IntColumn
    ep: IntColumn
    etp: IntColumn
    virtual_stages: IntColumn
    micro_batch_size: IntColumn
    accumulation: IntColumn

    @classmethod
    def from_plans(cls, plans: Sequence[ParallelPlan]) -> PlanTable:
        order: dict[Structure, int] = {}
        codes = [order.setdefault(p.structure, len(order)) for p in plans]
        columns = {n: np.array([getattr(p, n) for p in plans], dtype=np.int64) for n in NUMBERS}
        return cls(tuple(order), np.array(codes, dtype=np.int64), **columns)

    def __len__(self) -> int:
        return len(self.structure)

    @property
    def dp(self) -> IntColumn:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> IntColumn:
        return self.dp * self.tp * self.pp * self.cp

    def take(self, rows: Rows | NDArray[np.bool_]) -> PlanTable:
        """The rows of an index or mask, with the same structures."""
        return PlanTable(self.structures, self.structure[rows], **{n: getattr(self, n)[rows] for n in NUMBERS})

    def used(self) -> PlanTable:
        """The same rows, without structures that have none."""
        return PlanTable.concatenate([self])

    def plan(self, i: int) -> ParallelPlan:
        return ParallelPlan(self.structures[self.structure[i]], **{n: int(getattr(self, n)[i]) for n in NUMBERS})

    def by_structure(self) -> Iterator[tuple[Structure, NDArray[np.intp]]]:
        """(structure, indices of its rows) for each structure that has rows."""
        order = np.argsort(self.structure, kind="stable")
        codes, starts = np.unique(self.structure[order], return_index=True)
        for code, rows in zip(codes, np.split(order, starts[1:])):
            yield self.structures[int(code)], rows

    @classmethod
    def concatenate(cls, tables: Sequence[PlanTable]) -> PlanTable:
        """One table after the other, with the structures that have rows."""
        order: dict[Structure, int] = {}
        codes = []
        for t in tables:
            recode = np.zeros(len(t.structures), dtype=np.int64)
            for code in different(t.structure).tolist():
                recode[code] = order.setdefault(t.structures[code], len(order))
            codes.append(recode[t.structure])
        columns = {n: np.concatenate([getattr(t, n) for t in tables]) for n in NUMBERS}
        return cls(tuple(order), np.concatenate(codes), **columns)


def different(column: IntColumn) -> IntColumn:
    """The different entries of a column, ascending; counted where they are close together, which beats sorting and loads no masked arrays."""
    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    if high - low >= COUNTED:
        return np.unique(column, return_index=True)[0]
    return np.flatnonzero(np.bincount(column - low)) + low


def contiguous(rows: NDArray[np.intp]) -> Rows:
    """Rows that stand one after the other as a slice, so that taking them copies nothing."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def merged(table: PlanTable, stand_in: Callable[[Structure], Structure]) -> PlanTable:
    """The table with structures that `stand_in` makes equal as one."""
    order: dict[Structure, int] = {}
    codes = np.array([order.setdefault(stand_in(s), len(order)) for s in table.structures], dtype=np.int64)
    return replace(table, structures=tuple(order), structure=codes[table.structure]) if len(codes) else table
