"""What the ledger says about one plan: the terms of its peak with their numbers, and its moments in order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, Moment, Term
from ..table import PlanTable
from .activations import by_kernels
from .items import Happening, Item
from .ranks import Slot, in_flight
from .saved import Saved, kept_by, size
from .scope import Scope

SAVED = "saved for backward, all micro-batches in flight"
Replay = Callable[[Scope], list[tuple[Slot, list[Happening]]]]

LAYOUTS = {
    "sequence": "tokens (/ tp with sequence parallelism) x {width} x {bytes} bytes",
    "scattered": "tokens / tp x {width} x {bytes} bytes",
    "tensor": "tokens x {width} / tp x {bytes} bytes",
    "whole": "tokens x {width} x {bytes} bytes",
    "routed": "routed tokens x {width} x {bytes} bytes",
    "routed_tensor": "routed tokens x {width} / etp x {bytes} bytes",
    "scores": "micro-batch x {width} heads / tp x seq x seq / cp x {bytes} bytes",
    "heads": "tokens x {width} heads / tp x {bytes} bytes",
    "lse_rounded": "tokens, rounded to 32, x {width} heads / tp x {bytes} bytes",
}


@dataclass(frozen=True)
class LedgerDetail:
    """Replays a single row again, with names. See `memory_table.Detail`; `replay` gives the moments of each class of ranks."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    structure: Structure
    table: PlanTable
    replay: Replay

    def _worst(self, row: int) -> tuple[Scope, Slot, list[Happening]]:
        scope = Scope(self.model, self.cluster, self.job, self.structure, self.table.take(np.array([row])))
        slot, found = max(self.replay(scope), key=lambda pair: max(float(h.total()[0]) for h in pair[1]))
        return scope, slot, found

    def terms(self, row: int) -> list[Term]:
        """The terms of the peak, largest first; their bytes sum to it."""
        scope, slot, found = self._worst(row)
        peak = max(found, key=lambda h: float(h.total()[0]))
        terms: list[Term] = []
        for i in peak.items:
            if i.name == SAVED and self.structure.offload != "activations-cpu":
                terms += saved_terms(scope, slot, i)
            elif i.bytes[0]:
                terms.append(Term(i.name, i.part, i.formula, numbers(i.formula, int(i.bytes[0])), int(i.bytes[0]), i.source))
        return sorted(terms, key=lambda t: -t.bytes)

    def timeline(self, row: int) -> list[Moment]:
        """The moments of a step in order."""
        found = []
        for h in self._worst(row)[2]:
            parts = h.parts(1)
            found.append(Moment(h.name, h.phase, {part: int(parts[part][0]) for part in PARTS if parts[part][0]}))
        return found


def numbers(formula: str, size_bytes: int) -> str:
    """The formula's leading coefficient with what it multiplies: ``2 x parameters`` and 14 -> ``2 x 7``."""
    coefficient = re.match(r"(\d+(?:\.\d+)?) x ", formula)
    if coefficient and float(coefficient[1]):
        return f"{coefficient[1]} x {size_bytes / float(coefficient[1]):,.0f}"
    return f"{size_bytes:,}"


def saved_terms(scope: Scope, slot: Slot, all_saved: Item) -> list[Term]:
    """One term a saved tensor and kind of layer; what they leave of the whole (masks of the embedding, layers of other kinds) is a term
    of its own.
    """
    flying = float(in_flight(scope, slot.rank)[0])
    terms: list[Term] = []
    kernels = next(k for k, rows in by_kernels(scope) if rows[0])
    every = max(scope.structure.recompute_every, 1) if scope.structure.recompute == "full" else 1
    for name, count in slot.layers.items():
        kept = kept_by(scope.model.blocks[name], kernels, scope.structure, scope.framework.memory.selective)
        layers = float(np.ceil(count[0] / every))
        for s in kept:
            each = float(size(s, scope)[0])
            total = round(each * layers * flying)
            if total:
                text = f"{each:,.0f} x {layers:g} {'checkpoints' if every > 1 else 'layers'} x {flying:g} in flight"
                terms.append(Term(f"{name}: {s.tensor}", "activations", _formula(s), text, total, all_saved.source))
    rest = int(all_saved.bytes[0]) - sum(t.bytes for t in terms)
    if rest:
        terms.append(Term("saved outside of layers, and rounding", "activations", "what is left", f"{rest:,}", rest, all_saved.source))
    return terms


def _formula(s: Saved) -> str:
    return LAYOUTS[s.layout].format(width=f"{s.width:g}", bytes=f"{s.bytes:g}") + " x layers x in flight"
