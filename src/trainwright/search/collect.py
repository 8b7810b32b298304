"""The plans worth an exact answer: screens a whole space and drops what does not fit, cannot win or is never better than a plan that fits.

Two facts save most of the work, both tested:

* recomputation and offload only ever add time, so a plan that fits makes the same plan with more of either pointless (where time or cost is asked for),
  and a plan's screened time bounds all its variants from below. One exception: where activations go to the host, recomputation leaves fewer to move;
* the screened time never exceeds the exact one, so plans are priced in the order of the screen until enough of them fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..cost.table import Column, IntColumn, PlanTable
from .order import families, firsts
from .pricing import Pricing, fits
from .rules import Case, Rule
from .space import WITHOUT_SP, Space, allows_structure

# what the exact pass may add to a screened time, or plain tensor parallelism save, before plans beyond the cutoff could matter
SLACK = 1.1
CHUNKS = (512, 2_048, 8_192, 32_768, 131_072)  # rows whose memory is computed at once, best first
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
    screened below it is priced, however many fit. `start`: a cutoff that is known beforehand.
    `prune` off keeps slower plans as well (where memory is what is ranked).
    `distinct`: plans that differ in schedule, virtual stages or the split of data parallelism only count once among the `wanted`.
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
    distinct: bool = False
    start: float = np.inf  # seconds of a step that enough plans are known to keep
    seen: dict[int, dict[str, Column]] = field(
        default_factory=dict
    )  # parts of the times at each recomputation; `asked` is 1 where they are known
    kept: Kept = field(default_factory=Kept)

    def run(self) -> Kept:
        table, kept = self.space.table, self.kept
        kept.cutoff = min(self.slowest, self.start)
        fitting: dict[tuple[int, str], NDArray[np.bool_]] = {}
        known: dict[tuple[int, str], Column] = {}
        for offload in self.space.offloads:
            for r, recompute in enumerate(self.space.recomputes):
                here = self.space.at(table, recompute, offload)
                alive = self._legal(here)
                if self.prune:
                    dominated = _dominated(fitting, r, offload, len(table))
                    kept.credit(DOMINATED, (alive & dominated).sum())
                    alive &= ~dominated
                at_least = _at_least(known, len(table), r, offload)
                if offload == "activations-cpu":
                    at_least = np.maximum(at_least, self.pricing.least_seconds(here))
                rows = np.flatnonzero(alive & (at_least <= kept.cutoff))
                kept.credit(TOO_SLOW, alive.sum() - len(rows))
                rows = self._may_fit(here, rows)
                known[r, offload] = np.full(len(table), -np.inf)
                parts = self._parts(here, r, rows)
                if offload == "activations-cpu" and len(rows):  # what it moves is dear to find out
                    slow = self.pricing.at_least(parts, here.take(rows)) > kept.cutoff
                    kept.credit(TOO_SLOW, slow.sum())
                    rows, parts = rows[~slow], {k: c[~slow] for k, c in parts.items()}
                screened = np.maximum(at_least[rows], self.pricing.screened(parts, here.take(rows)) if len(rows) else 0.0)
                known[r, offload][rows] = screened
                fitting[r, offload] = self._price(here, rows, screened)
        if self.space.twins and kept.tables:
            self._without_sequence_parallelism()
        return kept

    def _parts(self, here: PlanTable, r: int, rows: NDArray[np.intp]) -> dict[str, Column]:
        """What the times of some rows are made of, whatever they offload; each row is asked for once."""
        known = self.seen.setdefault(r, {})
        asked = known.setdefault("asked", np.zeros(len(here)))
        new = rows[asked[rows] == 0]
        if len(new):
            asked[new] = 1
            for name, column in self.pricing.parts(here.take(new)).items():
                known.setdefault(name, np.zeros(len(here)))[new] = column
        return {name: column[rows] for name, column in known.items() if name != "asked"}

    def _without_sequence_parallelism(self) -> None:
        """The plain tensor-parallel twins of what is kept, which the space left out: they may be a percent faster, and need more memory."""
        kept = self.kept
        table = PlanTable.concatenate(kept.tables)
        parallel = np.array([s.sequence_parallel for s in table.structures])[table.structure]
        table = table.take(np.flatnonzero(parallel & (table.tp > 1) & (np.concatenate(kept.screened) <= kept.cutoff)))
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
            need = self.pricing.need(table.take(part), self.case.cluster.gpu.capacity_bytes)
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
        """The screened time of the `wanted`-th plan (of different families) that fits with the margin, and `SLACK` more, once there are so many."""
        kept = self.kept
        roomy = [~t for t in kept.tight]
        times = np.concatenate([c[r] for c, r in zip(kept.screened, roomy, strict=True)]) if roomy else np.zeros(0)
        most = min(self.slowest, self.start)
        if len(times) < self.wanted:
            return most
        order = np.argsort(times, kind="stable")
        best = times[order]
        if self.distinct:
            table = PlanTable.concatenate([t.take(r) for t, r in zip(kept.tables, roomy, strict=True)]).take(order)
            best = best[firsts(families(table))]
        if len(best) < self.wanted:
            return most
        return float(min(max(best[self.wanted - 1] * SLACK, self.floor), most))


def adds_time(r_less: int, less: str, r: int, offload: str) -> bool:
    """Whether the same plan can only be slower at recomputation `r` and `offload` than at `r_less` and `less`."""
    same = less == offload and (offload != "activations-cpu" or r_less == r)
    return r_less <= r and (same or less in LESS_OFFLOAD[offload])


def _at_least(known: dict[tuple[int, str], Column], n: int, r: int, offload: str) -> Column:
    """What is known of the time of every row from the same plan with no more recomputation and no more offload."""
    found = np.full(n, -np.inf)
    for (r_less, less), screened in known.items():
        if adds_time(r_less, less, r, offload):
            found = np.maximum(found, screened)
    return found


def _dominated(fitting: dict[tuple[int, str], NDArray[np.bool_]], r: int, offload: str, n: int) -> NDArray[np.bool_]:
    """Rows that fit already with no more recomputation and no more offload."""
    found = np.zeros(n, dtype=bool)
    for (r_less, less), fit in fitting.items():
        if adds_time(r_less, less, r, offload):
            found |= fit
    return found
