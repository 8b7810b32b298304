"""The plans worth an exact answer: a whole space, each plan looked at no closer than needed to tell that it cannot win.

Of a step's time its outline comes first (kernels and the pipeline's span, for the whole space), of memory a lower bound, then what the plan needs; the rest
of the time is computed for what fits. Each is a lower bound on the next. `Collector.price` does this for the plans below a limit; the ranking lowers the
limit as it learns how fast the plans are that fit.

Recomputation and offload only ever add time, so a plan that fits makes the same plan with more of either pointless (where time or cost is asked for). One
exception: where activations go to the host, recomputation leaves fewer to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cost.table import Column, IntColumn, PlanTable
from ..spec.plan import Structure
from .pricing import Least, Pricing, fits
from .rules import Case, Rule
from .space import WITHOUT_SP, Space, allows_structure

LESS_OFFLOAD = {  # what takes no more time: the same moves, or fewer, or to memory instead of disk
    "none": (),
    "optimizer-cpu": ("none",),
    "params-cpu": ("none", "optimizer-cpu"),
    "optimizer-nvme": ("none", "optimizer-cpu"),
    "params-nvme": ("none", "optimizer-cpu", "params-cpu", "optimizer-nvme"),
    "activations-cpu": ("none",),
}
NOT_FITTING = "does not fit into the GPU's memory"
DOMINATED = "recompute or offload where the same plan fits without"
TOO_SLOW = "slower, at best, than the plans kept"
TWIN = 0.02  # what plain tensor parallelism may save: up to 1.2 % was seen (docs/log.md)
AHEAD = 2**16  # plans of a level whose bounds are computed before anybody asks for them
TIGHT = "fits only inside the memory margin"
NO_HOST = "offload does not fit into the node's memory or disks"


@dataclass
class Kept:
    """Plans that fit, so far. `tight` ones fit only inside the memory margin."""

    tables: list[PlanTable] = field(default_factory=list)
    at_least: list[Column] = field(default_factory=list)  # seconds of a step
    device: list[IntColumn] = field(default_factory=list)
    tight: list[NDArray[np.bool_]] = field(default_factory=list)
    removed: dict[str, int] = field(default_factory=dict)

    def credit(self, rule: str, count: int) -> None:
        """Adds to the plans that a rule removed (a negative count gives some back)."""
        if count:
            self.removed[rule] = self.removed.get(rule, 0) + int(count)

    def add(self, table: PlanTable, at_least: Column, device: IntColumn, tight: NDArray[np.bool_]) -> None:
        if len(table):
            self.tables.append(table)
            self.at_least.append(at_least)
            self.device.append(device)
            self.tight.append(tight)

    def joined(self) -> tuple[PlanTable, Column, IntColumn, NDArray[np.bool_]]:
        """Everything that fits, in the order in which it was found."""
        table = PlanTable.concatenate(self.tables)
        return table, np.concatenate(self.at_least), np.concatenate(self.device), np.concatenate(self.tight)


@dataclass
class Level:
    """All rows of the space at one recomputation and offload.

    `bound`: seconds that a step takes at least. `open`: legal, and neither priced nor refused. `least`: bytes of a card that it needs at least, 0 where
    nobody asked. `fit`: fits with the margin.
    """

    recompute: int
    offload: str
    table: PlanTable
    outline: Mapping[str, Column]
    open: NDArray[np.bool_]
    bound: Column
    least: Column
    fit: NDArray[np.bool_]


@dataclass
class Collector:
    """Collects the plans of one space that fit. `margin`: share of the card kept free. `prune` off keeps plans that are never better as well (where memory
    is what is ranked)."""

    case: Case
    space: Space
    pricing: Pricing
    late: tuple[Rule, ...]
    margin: float
    prune: bool = True
    kept: Kept = field(default_factory=Kept)

    @cached_property
    def bounds(self) -> Least:
        """Of what every row needs, at any level."""
        return self.pricing.bounds(self.space.table)

    @cached_property
    def levels(self) -> list[Level]:
        """By offload, then by recomputation: what adds nothing first."""
        found, n = [], len(self.space.table)
        outlines = [
            self.pricing.outline(self.space.at(self.space.table, recompute, "none")) if n else {} for recompute in self.space.recomputes
        ]
        for offload in self.space.offloads:
            for r, recompute in enumerate(self.space.recomputes):
                here = self.space.at(self.space.table, recompute, offload)
                bound = self.pricing.outlined(outlines[r], here) if n else np.zeros(0)
                found.append(Level(r, offload, here, outlines[r], self._legal(here), bound, np.zeros(n), np.zeros(n, dtype=bool)))
        return found

    def price(self, limit: float, most: int, among: NDArray[np.bool_] | None = None) -> int:
        """Computes the memory of open plans that may take less than `limit` seconds and may fit, as far as is known: of the `most` that may be fastest. Returns
        how many there were."""
        ready = [(level, self._near(level, limit, among)) for level in self.levels]
        times = np.concatenate([level.bound[rows] for level, rows in ready])
        if len(times) > most:
            limit = float(np.partition(times, most - 1)[most - 1])
        for level, rows in ready:
            rows = rows[(level.bound[rows] <= limit) & ~self._dominated(level)[rows]]  # by what was priced just now
            if len(rows):
                level.open[rows] = False
                level.fit[rows] = self._keep(level.table.take(rows).used(), level.bound[rows])
        return min(len(times), most)

    def nearest(self, count: int) -> float:
        """Seconds within which `count` of the open plans may lie; infinite where there are no more."""
        bounds = np.concatenate([level.bound[level.open] for level in self.levels])
        return float(np.partition(bounds, count)[count]) if count < len(bounds) else np.inf

    def close(self, limit: float) -> None:
        """Ends the collection: twins of what may be shown, and a word for what is left."""
        if self.space.twins:
            self._price_twins(limit)
        for level in self.levels:
            dominated = (level.open & self._dominated(level)).sum()
            self.kept.credit(DOMINATED, dominated)
            self.kept.credit(TOO_SLOW, level.open.sum() - dominated)

    def _near(self, level: Level, limit: float, among: NDArray[np.bool_] | None) -> NDArray[np.intp]:
        """Open rows below the limit that may fit; dominated ones are dropped."""
        alive = level.open if among is None else level.open & among
        dominated = alive & self._dominated(level)
        self.kept.credit(DOMINATED, dominated.sum())
        level.open[dominated] = False
        rows = np.flatnonzero(alive & level.open & (level.bound <= limit))
        new = rows[level.least[rows] == 0]
        if not len(new):
            return rows
        ahead = np.flatnonzero(level.open & (level.least == 0))  # asked once: a call costs as much as some ten thousand rows
        new = ahead if len(ahead) <= AHEAD else new
        level.least[new] = self.bounds.least(level.table.structures, new)
        level.open[new] = may_fit = self._may_fit(level.least[new])
        if level.offload == "activations-cpu" and may_fit.any():  # what it moves is dear to find out
            new = new[may_fit]
            table = level.table.take(new)
            outline = {name: column[new] for name, column in level.outline.items()}
            level.bound[new] = np.maximum(level.bound[new], self.pricing.at_least(outline, table))
        return rows[level.open[rows] & (level.bound[rows] <= limit)]

    def _dominated(self, level: Level) -> NDArray[np.bool_]:
        """Rows that fit already with no more recomputation and no more offload."""
        found = np.zeros(len(level.open), dtype=bool)
        for less in self.levels if self.prune else ():
            if less is not level and adds_time(less.recompute, less.offload, level.recompute, level.offload):
                found |= less.fit
        return found

    def _legal(self, table: PlanTable) -> NDArray[np.bool_]:
        known: dict[tuple[object, ...], bool] = {}  # most structures differ in what no rule reads

        def allowed(rule: Rule, s: Structure) -> bool:
            key = (rule.name, *(getattr(s, field, None) for field in rule.reads))
            if key not in known:
                known[key] = allows_structure(self.case, rule, s)
            return known[key]

        good = np.array([all(allowed(rule, s) for rule in self.late) for s in table.structures], dtype=bool)
        return good[table.structure] if len(table) else np.zeros(0, dtype=bool)

    def _may_fit(self, least: Column) -> NDArray[np.bool_]:
        good = least <= self.case.cluster.gpu.capacity_bytes
        self.kept.credit(NOT_FITTING, (~good).sum())
        return good

    def _keep(self, table: PlanTable, at_least: Column) -> NDArray[np.bool_]:
        """Keeps what fits of a table; returns which rows of it fit with the margin."""
        capacity = self.case.cluster.gpu.capacity_bytes
        need = self.pricing.need(table, capacity)
        roomy, inside = fits(need, self.case.cluster, self.margin)
        card = need.device > capacity
        self.kept.credit(NOT_FITTING, card.sum())
        self.kept.credit(NO_HOST, (~inside & ~card).sum())
        self.kept.add(table.take(inside), at_least[inside], need.device[inside], ~roomy[inside])
        return roomy

    def _price_twins(self, limit: float) -> None:
        """Plain tensor parallelism beside plans with sequence parallelism, which the space left out: it may be `TWIN` faster, and needs more memory."""
        found = []
        for level in self.levels:
            parallel = np.array([s.sequence_parallel for s in level.table.structures], dtype=bool)[level.table.structure]
            may = level.fit | (level.open & (level.least > 0))
            table = level.table.take(may & parallel & (level.table.tp > 1) & (level.bound * (1 - TWIN) <= limit))
            found.append(replace(table, structures=tuple(replace(s, sequence_parallel=False) for s in table.structures)))
        table = PlanTable.concatenate([t for t in found if len(t)] or found[:1])
        if len(table):
            seconds = self.pricing.outlined(self.pricing.outline(table), table)
            table, seconds = table.take(seconds <= limit), seconds[seconds <= limit]
            self.kept.credit(WITHOUT_SP, -len(table))
        may_fit = self._may_fit(self.pricing.bounds(table).least(table.structures, np.arange(len(table))))
        if may_fit.any():
            self._keep(table.take(may_fit), seconds[may_fit])


def adds_time(r_less: int, less: str, r: int, offload: str) -> bool:
    """Whether the same plan can only be slower at recomputation `r` and `offload` than at `r_less` and `less`."""
    same = less == offload and (offload != "activations-cpu" or r_less == r)
    return r_less <= r and (same or less in LESS_OFFLOAD[offload])
