"""What the ledger says about one plan: the terms of its peak, and its moments in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, Moment, Term
from ..table import PlanTable
from .engine import happenings, pieces, rank_weights
from .items import Happening
from .ranks import slots
from .scope import Scope


@dataclass(frozen=True)
class LedgerDetail:
    """Replays a single row again, with names. See `memory_table.Detail`."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    structure: Structure
    table: PlanTable

    def _moments(self, row: int) -> list[Happening]:
        scope = Scope(self.model, self.cluster, self.job, self.structure, self.table.take(np.array([row])))
        p = pieces(scope)
        worst: list[Happening] = []
        for slot in slots(scope):
            found = happenings(p, slot, rank_weights(p, slot))[0]
            if not worst or max(float(h.total()[0]) for h in found) > max(float(h.total()[0]) for h in worst):
                worst = found
        return worst

    def terms(self, row: int) -> list[Term]:
        """The terms of the peak, largest first; their bytes sum to it."""
        peak = max(self._moments(row), key=lambda h: float(h.total()[0]))
        terms = [Term(i.name, i.part, i.formula, f"{int(i.bytes[0]):,}", int(i.bytes[0]), i.source) for i in peak.items if i.bytes[0]]
        return sorted(terms, key=lambda t: -t.bytes)

    def timeline(self, row: int) -> list[Moment]:
        found = []
        for h in self._moments(row):
            parts = h.parts(1)
            found.append(Moment(h.name, h.phase, {part: int(parts[part][0]) for part in PARTS if parts[part][0]}))
        return found
