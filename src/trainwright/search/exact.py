"""The exact pass over plans that fit, best first, until no other can be among those shown."""

from __future__ import annotations

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

    def look(self) -> None:
        """Prices a few of what `kept` has got since, the best of each family, as far as they may lower the limit."""
        order, best = self._waiting(tight=False), self._best()
        if len(best) >= self.top:
            order = order[self._known()[order] < best[self.top - 1]]
        if not len(order):
            return
        table = PlanTable.concatenate(self.kept.tables)
        if self.distinct:
            order = order[firsts(families(table.take(order)))]
        self._add(table, order[: self.top])

    def finish(self, tight: bool = False) -> None:
        """Prices everything that may be shown; of plans inside the memory margin only with `tight`."""
        order, most = self._waiting(tight), len(self.rows) + self.most
        table, known = PlanTable.concatenate(self.kept.tables) if len(order) else None, self._known()
        count = self._batch
        while table is not None and len(order) and len(self.rows) < most:
            best = self._best()
            if len(best) >= self.top and (self.by_memory or known[order[0]] > best[self.top - 1] * (1 + self.tie)):
                break
            some, order = np.split(order, [min(count, most - len(self.rows))])
            self._add(table, some)
            count *= 2  # a call costs as much as some ten plans

    @property
    def _batch(self) -> int:
        return max(16, 2 * self.top)

    def _waiting(self, tight: bool) -> IntColumn:
        """Plans that may be shown and were not priced, best first."""
        if not self.kept.tables:
            return np.zeros(0, np.int64)
        table, at_least, device, inside_margin = self.kept.joined()
        waiting = (~inside_margin | tight) & (at_least <= min(self.slowest, self.limit()))
        waiting[self.rows] = False
        left = np.flatnonzero(waiting)
        if len(left) > self._batch:
            self._screen(table, left)
        known = self._known()[left]
        return left[np.lexsort((known, device[left])) if self.by_memory else np.argsort(known, kind="stable")]

    def _known(self) -> Column:
        """Seconds that a step takes at least: screened ones where they were asked for."""
        at_least = np.concatenate([np.zeros(0), *self.kept.at_least])
        self.screened = np.concatenate([self.screened, np.full(len(at_least) - len(self.screened), np.nan)])
        return np.where(np.isnan(self.screened), at_least, self.screened)

    def _screen(self, table: PlanTable, rows: IntColumn) -> None:
        """Screened times tell which of many plans to price first."""
        self._known()
        new = rows[np.isnan(self.screened[rows])]
        if len(new):
            self.screened[new] = self.pricing.screen(table.take(new))

    def _add(self, table: PlanTable, rows: IntColumn) -> None:
        step_s, breakdown = self.pricing.exact(table.take(rows))
        self.rows, self.step_s = np.concatenate([self.rows, rows]), np.concatenate([self.step_s, step_s])
        self.breakdown = {k: np.concatenate([self.breakdown.get(k, np.zeros(0)), c]) for k, c in breakdown.items()}

    def _best(self) -> Column:
        """Exact times that keep every limit, one of each family, the best first."""
        good = np.flatnonzero(self.step_s <= self.slowest)
        good = good[np.argsort(self.step_s[good], kind="stable")]
        if self.distinct and len(good):
            good = good[firsts(families(PlanTable.concatenate(self.kept.tables).take(self.rows[good])))]
        return self.step_s[good]
