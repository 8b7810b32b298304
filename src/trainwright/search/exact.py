"""The exact pass over plans that fit, best first, until no other can be among those shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..cost.table import Column, IntColumn, PlanTable
from .collect import Kept
from .order import families, firsts
from .pricing import Pricing


@dataclass
class ExactPass:
    """Exact times of plans that a `Collector` keeps.

    `top` plans of different families (with `distinct`) are wanted and at most `most` priced; those within `tie` of the last are priced as well. `slowest`:
    seconds of a step beyond which a plan breaks a deadline or budget. `by_memory`: the smallest first.
    """

    pricing: Pricing
    kept: Kept
    top: int
    most: int
    tie: float
    distinct: bool
    slowest: float
    by_memory: bool
    screened: Column = field(default_factory=lambda: np.zeros(0))  # of `kept`, where it was asked for
    rows: IntColumn = field(default_factory=lambda: np.zeros(0, np.int64))  # priced, in the order of `kept`
    step_s: Column = field(default_factory=lambda: np.zeros(0))
    breakdown: dict[str, Column] = field(default_factory=dict)

    def limit(self) -> float:
        """Seconds of a step beyond which no plan can be shown; infinite while too few are known."""
        best = self._best()
        return float(best[self.top - 1]) * (1 + self.tie) if len(best) >= self.top else np.inf

    def update(self, tight: bool = False) -> None:
        """Prices what `kept` has got since, as far as it may be shown; of plans inside the memory margin only with `tight`."""
        if not self.kept.tables:
            return
        table, at_least, device, inside_margin = self.kept.joined()
        waiting = (~inside_margin | tight) & (at_least <= min(self.slowest, self.limit()))
        waiting[self.rows] = False
        left = np.flatnonzero(waiting)
        batch = max(16, 2 * self.top)
        screened = self._screened(table, at_least, left) if len(left) > batch else at_least
        order = left[np.lexsort((screened[left], device[left])) if self.by_memory else np.argsort(screened[left], kind="stable")]
        while len(order) and len(self.rows) < self.most:
            best = self._best(table)
            enough = len(best) >= self.top
            if enough and (self.by_memory or screened[order[0]] > best[self.top - 1] * (1 + self.tie)):
                break
            some, order = np.split(order, [min(batch, self.most - len(self.rows))])
            self._add(some, *self.pricing.exact(table.take(some)))

    def _screened(self, table: PlanTable, at_least: Column, rows: IntColumn) -> Column:
        """Seconds that tell which of many plans to price first: screened ones, each row's once, of the others what is known."""
        known = len(self.screened)
        self.screened = np.concatenate([self.screened, np.full(len(table) - known, np.nan)])
        new = rows[np.isnan(self.screened[rows])]
        if len(new):
            self.screened[new] = self.pricing.screen(table.take(new))
        return np.where(np.isnan(self.screened), at_least, self.screened)

    def _add(self, rows: IntColumn, step_s: Column, breakdown: Mapping[str, Column]) -> None:
        self.rows, self.step_s = np.concatenate([self.rows, rows]), np.concatenate([self.step_s, step_s])
        self.breakdown = {k: np.concatenate([self.breakdown.get(k, np.zeros(0)), c]) for k, c in breakdown.items()}

    def _best(self, table: PlanTable | None = None) -> Column:
        """Exact times that keep every limit, one of each family, the best first."""
        good = np.flatnonzero(self.step_s <= self.slowest)
        good = good[np.argsort(self.step_s[good], kind="stable")]
        if self.distinct and len(good):
            table = PlanTable.concatenate(self.kept.tables) if table is None else table
            good = good[firsts(families(table.take(self.rows[good])))]
        return self.step_s[good]
