"""Pipeline parallelism: any schedule of the registry executed on real arrays.

A rank works through its list of actions in order: F takes the input from the rank before (or the tokens) and hands its result on; B (or I, the input gradient,
and later W, the weight gradients) the same way back. A send does not wait; a receive does. A list that waits for itself is a deadlock, and is
named. A bidirectional schedule (DualPipe) keeps two copies of the weights, whose gradients are summed over the pair ("twins").
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..schedules import SCHEDULES
from ..schedules.actions import Action, ActionTable
from .collectives import Array, bounds
from .layers import saved_bytes
from .layout import Layout
from .model import TinyConfig
from .recompute import segment, segments

if TYPE_CHECKING:
    from .run import Micro, Run


@dataclass(frozen=True)
class Plan:
    """Every pipeline rank's actions, and the units (embedding, blocks, head) of every stage."""

    table: ActionTable
    units: tuple[tuple[int, ...], ...]
    splits_backward: bool

    def rank_of(self, stage: int, microbatch: int) -> int:
        return int(self.table.placement.rank_of(stage, microbatch))

    def stages_of(self, pipeline_rank: int) -> list[int]:
        return self.table.placement.stages_of(pipeline_rank)

    def units_of(self, pipeline_rank: int) -> set[int]:
        return {u for s in self.stages_of(pipeline_rank) for u in self.units[s]}

    def holders(self) -> dict[int, set[int]]:
        """{unit: the pipeline ranks that hold its weights}."""
        found: dict[int, set[int]] = {}
        for rank in range(self.table.placement.ranks):
            for unit in self.units_of(rank):
                found.setdefault(unit, set()).add(rank)
        return found


def units_of_stages(config: TinyConfig, stages: int, layers_per_stage: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Embedding, blocks and head dealt to stages as evenly as they go (embedding and head count as one each), or as `layers_per_stage` says."""
    total = config.layers + 2
    if layers_per_stage:
        if len(layers_per_stage) != stages or sum(layers_per_stage) != config.layers or min(layers_per_stage) < 0:
            raise SpecError(f"{list(layers_per_stage)} does not deal {config.layers} layers to {stages} stages", "layers_per_stage")
        sizes = list(layers_per_stage)
        sizes[0] += 1
        sizes[-1] += 1
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    if stages > total:
        raise SpecError(f"{config.layers} layers with embedding and head cannot fill {stages} stages", "pp", [total])
    return tuple(tuple(range(a, b)) for a, b in bounds(total, stages))


def _from_registry(name: str, layout: Layout) -> ActionTable:
    table: ActionTable = SCHEDULES.get_or_raise(name, "schedule").table(layout.pp, layout.microbatches, layout.virtual_stages or None)
    return table


def plan(config: TinyConfig, layout: Layout) -> Plan:
    """The layout's schedule as lists of actions. Raises `SpecError` where the schedule does not exist for these sizes."""
    table = layout.schedule if isinstance(layout.schedule, ActionTable) else _from_registry(layout.schedule, layout)
    found = table.placement.ranks, table.placement.microbatches
    if found != (layout.pp, layout.microbatches):
        raise SpecError(
            f"{table.name} is for {found[0]} ranks and {found[1]} microbatches, not {layout.pp} and {layout.microbatches}", "schedule"
        )
    units = units_of_stages(config, table.placement.stages, layout.layers_per_stage)
    return Plan(table, units, bool((table.kind == 2).any()))


class Stage:
    """One stage on one rank: keeps each microbatch's backward until it is asked for."""

    def __init__(self, run: Run, units: Sequence[int]) -> None:
        self.run, self.segments = run, segments(run.config, run.layout, units)
        self.kept: dict[int, list[tuple[Callable[[Any], Any], int]]] = {}
        self.later: dict[int, tuple[list[Callable[[], None]], int]] = {}

    def forward(self, number: int, micro: Micro, x: Any) -> Any:
        self.kept[number] = []
        for units in self.segments:
            x, backward, size = segment(self.run, units, x, micro)
            self.run.keep_activations(size)
            self.kept[number].append((backward, size))
        return x

    def backward(self, number: int, dy: Any, split: bool) -> Any:
        """The input gradient; with `split` the weight gradients wait for `weight`."""
        self.run.deferred = [] if split else None
        for backward, size in reversed(self.kept.pop(number)):
            self.run.fetch_activations(size)
            dy = backward(dy)
            self.run.ledger.free("activations", size)
        if self.run.deferred is not None:
            size = saved_bytes(self.run.deferred)
            self.run.ledger.hold("activations", size)
            self.later[number] = (self.run.deferred, size)
            self.run.deferred = None
        return dy

    def weight(self, number: int) -> None:
        work, size = self.later.pop(number)
        for add in work:
            add()
        self.run.ledger.free("activations", size)


def pieces(actions: Sequence[Action]) -> list[Action]:
    """The actions with overlapped pairs taken apart: on numbers, F then B."""
    return [piece for action in actions for piece in (action.parts or (action,))]


def execute(run: Run, plan: Plan, micros: Sequence[Micro], weights: Sequence[float]) -> float:
    """One step's forwards and backwards on this rank; returns the weighted loss that it computed (0 but on the last stage)."""
    stages = {s: Stage(run, plan.units[s]) for s in plan.stages_of(run.at.pp)}
    last, loss = len(plan.units) - 1, 0.0
    todo = Counter(a.microbatch for a in pieces(plan.table.lists[run.at.pp]) if a.kind in "BW")

    def peer(stage: int, microbatch: int) -> int:
        return run.layout.rank(run.at._replace(pp=plan.rank_of(stage, microbatch)))

    def passed(source: int, kind: str, stage: int, microbatch: int) -> Array:
        return run.rank.receive(source, f"{kind} of microbatch {microbatch} from stage {stage}")

    def hand(target: int, kind: str, stage: int, microbatch: int, array: Array) -> None:
        run.rank.send(target, array, f"{kind} of microbatch {microbatch} from stage {stage}", "pp")

    for action in pieces(plan.table.lists[run.at.pp]):
        s, mb = action.stage, action.microbatch
        if action.kind == "F":
            x = None if s == 0 else passed(peer(s - 1, mb), "output", s - 1, mb)
            y = stages[s].forward(mb, micros[mb], x)
            if s == last:
                loss += y * weights[mb]
            else:
                hand(peer(s + 1, mb), "output", s, mb, y)
        elif action.kind in "BI":
            dy = run.upstream(weights[mb]) if s == last else passed(peer(s + 1, mb), "gradient", s + 1, mb)
            dx = stages[s].backward(mb, dy, split=action.kind == "I")
            if s > 0:
                hand(peer(s - 1, mb), "gradient", s, mb, dx)
        else:
            stages[s].weight(mb)
        if action.kind in "BW":
            todo[mb] -= 1
            if todo[mb] == 0:
                run.store.end_microbatch()
        run.ledger.mark(str(action))
    return loss
