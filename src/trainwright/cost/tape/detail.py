"""Why a plan's peak is what it is: its step replayed whole, with every storage's name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import PARTS, Moment, Term
from ..table import PlanTable
from .machine import Place, padded
from .pipeline import PIECES, Rank, of_others, pieces_of
from .program import others_at, pattern, phase_of
from .setup import Setup, Variant
from .sizes import Columns
from .step import Step

SOURCE = "replay of torch 2.13's allocations"


class Detail:
    """Answers for the rows of one group."""

    def __init__(
        self, model: ModelSpec, job: TrainingJob, structure: Structure, table: PlanTable, rank: Rank, variant: Variant, columns: Columns
    ) -> None:
        self.model, self.job, self.structure, self.table = model, job, structure, table
        self.rank, self.variant, self.columns = rank, variant, columns

    def replayed(self, row: int, named: bool = True) -> tuple[Step, list[int]]:
        """The step with all its layers, and the value of each of its sizes; `named`: with the names of what is alive at each moment."""
        stage = self.rank.stage
        every = self.structure.recompute_every if self.structure.recompute == "full" else 1
        stage = replace(stage, layers=pattern(stage.layers, every).layers(int(self.rank.repeats[row])))
        setup = Setup(self.model, self.job, self.structure, self.variant, stage)
        step = Step(setup, [self.model.blocks[name] for name in stage.layers], named=named)
        step.replay()
        return step, [int(np.broadcast_to(s.value(self.columns), (len(self.table),))[row]) for s in step.symbols.table]

    def _held(self, place: Place, row: int) -> NDArray[np.float64]:
        """[pieces, 1] micro-batches in flight at a moment, this one among them."""
        held, last = self.rank.held[:, row], self.rank.last[:, row]
        return np.stack((held, last, np.ones_like(held)))[others_at(place)][:, None]

    def _others(self, step: Step, values: list[int], held: NDArray[np.float64]) -> dict[tuple[str, int], int]:
        """Bytes that the other micro-batches in flight keep, by (piece, part)."""

        def total(name: str) -> NDArray[np.int64]:
            found = np.zeros((len(PARTS), 1), dtype=np.int64)
            for key in np.flatnonzero(step.tape.marks[name]):
                found[key % len(PARTS)] += int(step.tape.marks[name][key]) * values[key // len(PARTS)]
            return found

        found = of_others(pieces_of({name: total(name) for name in ("saved", *self.rank.apart)}), held)
        return {(name, part): int(size) for name, sizes in found.items() for part, size in enumerate(sizes[:, 0]) if size}

    def terms(self, row: int) -> list[Term]:
        """What is alive at the peak, by name and size, largest first."""
        step, values = self.replayed(row)
        tape = step.tape

        def total(i: int) -> int:
            place, _, live = tape.moments[i]
            others = self._others(step, values, self._held(place, row))
            return sum(values[k // len(PARTS)] * int(live[k]) for k in np.flatnonzero(live)) + sum(others.values())

        best = max(range(len(tape.moments)), key=total)
        found = []
        for (what, part, symbol), count in tape.named[best].items():
            formula = step.symbols.table[symbol].formula
            numbers = f"{count:,}" if formula == "1" else f"{count:,} x {values[symbol]:,}"
            words = f"{count:,} x {formula}" if formula != "1" else f"{count:,}"
            found.append(Term(what, PARTS[part], words, numbers, count * values[symbol], SOURCE))
        held = self._held(tape.moments[best][0], row)
        for (piece, part), size in self._others(step, values, held).items():
            more = float(held[PIECES.index(piece), 0]) - 1
            name, numbers = f"other micro-batches in flight: {piece}", f"{more:g} x {size / more:,.0f}"
            found.append(Term(name, PARTS[part], "(in flight - 1) x saved", numbers, size, "schedule's peak in flight"))
        return sorted(found, key=lambda t: -t.bytes)

    def timeline(self, row: int) -> list[Moment]:
        """Local peaks of the step in order, beside what the other micro-batches in flight keep."""
        step, values = self.replayed(row, named=False)
        places = [place for place, _, _ in step.tape.moments]
        live = np.stack([padded(live, len(values) * len(PARTS)) for _, _, live in step.tape.moments])
        parts = np.einsum("nsp,s->np", live.reshape(len(places), len(values), len(PARTS)), np.array(values, dtype=np.int64))
        kinds = [others_at(place) for place in places]
        for kind in set(kinds):
            alike = [i for i, k in enumerate(kinds) if k == kind]
            for (_, part), size in self._others(step, values, self._held(places[alike[0]], row)).items():
                parts[alike, part] += size
        return [
            Moment(
                (f"layer {place[1]}: " if 0 <= place[1] < len(step.layers) else "") + what,
                phase_of(place),
                dict(zip(PARTS, sizes, strict=True)),
            )
            for (place, what, _), sizes in zip(step.tape.moments, parts.tolist(), strict=True)
        ]
