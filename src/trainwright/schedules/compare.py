"""Two schedules at equal memory: the one that needs more gets smaller microbatches, and more of them, until both peak at the same activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SpecError
from .actions import ActionTable
from .replay import schedule
from .timeline import Timeline

MAX_CUT = 16


@dataclass(frozen=True)
class Sized:
    """A schedule by name and size, with whole-share costs as in `schedule`."""

    name: Any
    stages: int
    microbatches: int
    virtual_stages: int | None
    costs: Mapping[str, Any]

    def replay(self, microbatches: int | None = None) -> Timeline:
        """Replayed, on `microbatches` smaller ones where given: the same work and the same activations in more pieces."""
        m = microbatches or self.microbatches
        part = self.microbatches / m if m else 1
        if part != 1 and isinstance(self.name, ActionTable):
            raise SpecError("a list of actions has its own microbatches", "microbatches", str(self.microbatches))
        scaled: dict[str, Any] = {
            k: np.asarray(v, float) * part if k in ("forward", "backward", "weight", "recompute", "message_bytes") else v
            for k, v in self.costs.items()
        }
        t = schedule(self.name, self.stages, m, self.virtual_stages, **scaled)
        if part == 1:
            return t
        return schedule(self.name, self.stages, m, self.virtual_stages, **scaled, activations=part / t.virtual_stages)


def at_equal_memory(one: Sized, other: Sized) -> tuple[Timeline, Timeline, str]:
    """Both replayed so that neither holds more activations than the thriftier one at its given size, and a sentence that says what was done.

    Where cutting microbatches in up to 16 pieces does not get there (GPipe holds the whole batch, however it is cut), each keeps its own memory and
    the sentence says so.
    """
    a, b = one.replay(), other.replay()
    top_a, top_b = max(a.peak_per_rank), max(b.peak_per_rank)
    if abs(top_a - top_b) <= 1e-9:
        return a, b, f"Both hold {top_a:.4g} microbatches' activations at most."
    hungry, cap = (one, top_b) if top_a > top_b else (other, top_a)
    for m in range(hungry.microbatches + 1, MAX_CUT * hungry.microbatches + 1):
        try:
            cut = hungry.replay(m)
        except SpecError:
            continue
        if max(cut.peak_per_rank) <= cap + 1e-9:
            note = (
                f"At equal memory ({cap:.4g} microbatches' activations): {cut.name} runs {m} microbatches of {hungry.microbatches / m:.3g} the size instead of "
                f"{hungry.microbatches}. Smaller products may run at a lower rate, which is not counted."
            )
            return (cut, b, note) if hungry is one else (a, cut, note)
    note = (
        f"No size of microbatch brings {(a if hungry is one else b).name} down to {cap:.4g} microbatches' activations, so each is shown at its own memory, "
        f"{max(top_a, top_b):.4g} against {cap:.4g}."
    )
    return a, b, note
