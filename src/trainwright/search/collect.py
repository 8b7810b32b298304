"""The plans worth an exact answer: screens a whole space and drops what does not fit, cannot win or is never better than a plan that fits.

Two facts save most of the work, both tested:

* recomputation and offload only ever add time, so a plan that fits makes the same plan with more of either pointless (where time or cost is asked for),
  and a plan's screened time bounds all its variants from below;
* the screened time never exceeds the exact one, so plans are priced in the order of the screen until enough of them fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..cost.table import Column, IntColumn, PlanTable
from .pricing import Pricing, fits
from .rules import Case, Rule
from .space import WITHOUT_SP, Space, allows_structure

CHUNKS = (512, 2_048, 8_192, 32_768, 131_072)  # rows whose memory is computed at once, best first
NOT_FITTING = "does not fit into the GPU's memory"
DOMINATED = "recompute or offload where the same plan fits without"
TOO_SLOW = "slower, at best, than the plans kept"
TIGHT = "fits only inside the memory margin"
NO_HOST = "offload does not fit into the node's memory or disks"


@dataclass
class Kept:
    """Plans that fit, so far. `tight` ones fit only inside the memory margin."""

    tables: list[PlanTable] = field(default_factory=list)
    screened: list[Column] = field(default_factory=list)
    device: list[IntColumn] = field(default_factory=list)
    tight: list[NDArray[np.bool_]] = field(default_factory=list)
    removed: dict[str, int] = field(default_factory=dict)
    cutoff: float = np.inf
    smallest: int | None = None  # least device memory that a plan can have, by the lower bound

    def credit(self, rule: str, count: int) -> None:
        """Adds to the plans that a rule removed (a negative count gives some back)."""
        if count:
            self.removed[rule] = self.removed.get(rule, 0) + int(count)

    def add(self, table: PlanTable, screened: Column, device: IntColumn, tight: NDArray[np.bool_]) -> None:
        if len(table):
            self.tables.append(table)
            self.screened.append(screened)
            self.device.append(device)
            self.tight.append(tight)

    def joined(self) -> tuple[PlanTable, Column, IntColumn]:
        """Everything that fits; the tight ones only where nothing else does. Best screened time first."""
        table, screened, device = PlanTable.concatenate(self.tables), np.concatenate(self.screened), np.concatenate(self.device)
        tight = np.concatenate(self.tight)
        if (~tight).any():
            self.credit(TIGHT, tight.sum())
            keep = np.flatnonzero(~tight)
        else:
            keep = np.arange(len(tight))
        order = keep[np.argsort(screened[keep], kind="stable")]
        return table.take(order), screened[order], device[order]


@dataclass
class Collector:
    """Collects the plans of one space that fit and may be among the `wanted` fastest.

    `margin`: share of the card kept free. `slowest`: seconds of a step beyond which a plan breaks a deadline or budget. `floor`: every plan
    screened below it is priced, however many fit. `prune` off keeps slower plans as well (where memory is what is ranked).
    """

    case: Case
    space: Space
    pricing: Pricing
    late: tuple[Rule, ...]
    margin: float
    wanted: int
    slowest: float = np.inf
    floor: float = 0.0
    prune: bool = True
    kept: Kept = field(default_factory=Kept)

    def run(self) -> Kept:
        table, kept = self.space.table, self.kept
        kept.cutoff = self.slowest
        first = self.pricing.screen(table) if len(table) else np.zeros(0)
        fitting: dict[tuple[int, int], NDArray[np.bool_]] = {}
        for o, offload in enumerate(self.space.offloads):
            for r, recompute in enumerate(self.space.recomputes):
                here = self.space.at(table, recompute, offload)
                alive = self._legal(here)
                if self.prune:
                    dominated = _dominated(fitting, r, o, len(table))
                    kept.credit(DOMINATED, (alive & dominated).sum())
                    alive &= ~dominated
                rows = np.flatnonzero(alive & (first <= kept.cutoff))
                kept.credit(TOO_SLOW, alive.sum() - len(rows))
                rows = self._may_fit(here, rows)
                screened = first[rows] if not fitting or not len(rows) else np.maximum(first[rows], self.pricing.screen(here.take(rows)))
                fitting[r, o] = self._price(here, rows, screened)
        if self.space.twins and kept.tables:
            self._without_sequence_parallelism()
        return kept

    def _without_sequence_parallelism(self) -> None:
        """The plain tensor-parallel twins of what is kept, which the space left out: they may be a percent faster, and need more memory."""
        kept = self.kept
        table = PlanTable.concatenate(kept.tables)
        parallel = np.array([s.sequence_parallel for s in table.structures])[table.structure]
        table = table.take(np.flatnonzero(parallel & (table.tp > 1)))
        table = replace(table, structures=tuple(replace(s, sequence_parallel=False) for s in table.structures))
        kept.credit(WITHOUT_SP, -len(table))
        rows = self._may_fit(table, np.arange(len(table)))
        self._price(table, rows, self.pricing.screen(table.take(rows)) if len(rows) else np.zeros(0))

    def _legal(self, table: PlanTable) -> NDArray[np.bool_]:
        good = np.array([all(allows_structure(self.case, rule, s) for rule in self.late) for s in table.structures], dtype=bool)
        return good[table.structure] if len(table) else np.zeros(0, dtype=bool)

    def _may_fit(self, table: PlanTable, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows that the lower bound on memory does not refuse."""
        least = self.pricing.least(table.take(rows))
        good = least <= self.case.cluster.gpu.capacity_bytes
        self.kept.credit(NOT_FITTING, (~good).sum())
        if len(rows):
            self.kept.smallest = int(min(least.min(), self.kept.smallest or least.min()))
        return rows[good]

    def _price(self, table: PlanTable, rows: NDArray[np.intp], screened: Column) -> NDArray[np.bool_]:
        """Memory of `rows` of the table, fastest first, until the rest cannot win; returns which rows of the table fit with the margin."""
        kept, fit = self.kept, np.zeros(len(table), dtype=bool)
        order = np.argsort(screened, kind="stable")
        rows, screened = rows[order], screened[order]
        start, step = 0, 0
        while start < len(rows):
            end = int(np.searchsorted(screened, kept.cutoff, side="right"))
            end = min(end, start + CHUNKS[min(step, len(CHUNKS) - 1)])
            if end <= start:
                kept.credit(TOO_SLOW, len(rows) - start)
                break
            part = rows[start:end]
            need = self.pricing.need(table.take(part))
            roomy, inside = fits(need, self.case.cluster, self.margin)
            fit[part] = roomy
            card = need.device > self.case.cluster.gpu.capacity_bytes
            kept.credit(NOT_FITTING, card.sum())
            kept.credit(NO_HOST, (~inside & ~card).sum())
            kept.add(table.take(part[inside]), screened[start:end][inside], need.device[inside], ~roomy[inside])
            if self.prune:
                kept.cutoff = self._cutoff()
            start, step = end, step + 1
        return fit

    def _cutoff(self) -> float:
        """The screened time of the `wanted`-th plan that fits with the margin, once there are so many."""
        kept = self.kept
        times = np.concatenate(kept.screened)[~np.concatenate(kept.tight)] if kept.screened else np.zeros(0)
        if len(times) < self.wanted:
            return self.slowest
        return float(min(max(np.partition(times, self.wanted - 1)[self.wanted - 1], self.floor), self.slowest))


def _dominated(fitting: dict[tuple[int, int], NDArray[np.bool_]], r: int, o: int, n: int) -> NDArray[np.bool_]:
    """Rows that fit already with no more recomputation and no offload, or the same one."""
    found = np.zeros(n, dtype=bool)
    for (r_less, o_less), fit in fitting.items():
        if r_less <= r and o_less in (0, o):
            found |= fit
    return found
