"""The provably best order for a small pipeline, by constraint programming (OR-tools CP-SAT; extra ``solve``), started from the best order known.

Intervals per (stage, microbatch, kind), no overlap on a rank, messages as precedences, activations as a cumulative resource from the start of F to
the end of W; microbatches of a kind keep their order, which loses nothing where they cost the same.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import SpecError
from .actions import ActionTable, B, F, I, Placement, PlacementKind, W
from .automatic import candidates
from .bounds import lower_bound
from .costs import Costs, whole_share
from .replay import replay
from .timeline import Timeline

MAX_ACTIONS = 3000
MAX_SCALE = 10_000


@dataclass(frozen=True)
class Optimum:
    """The best order found; `bound` no order under the cap can beat; `proven` when they meet. `start` names the order that the search began with and
    `start_objective` its value.
    """

    timeline: Timeline
    objective: float
    bound: float
    proven: bool
    start: str
    start_objective: float
    seconds: float
    exact: bool


def optimal(
    stages: int,
    microbatches: int,
    virtual_stages: int = 1,
    forward: Any = 1.0,
    backward: Any = 1.0,
    weight: Any = 1.0,
    p2p: float = 0.0,
    cap: float | None = None,
    split: bool = True,
    placement: PlacementKind = "loop",
    objective: str = "makespan",
    time_limit_s: float = 30.0,
    workers: int = 2,
) -> Optimum:
    """The shortest step (or longest rank's `span`) under an activation cap in units of one rank's whole activations (None: p, what 1F1B needs).

    Costs as in `schedule`. Raises `SpecError` where OR-tools is absent, the problem is too large, or no order keeps the cap.
    """
    kinds = 3 if split else 2
    if (size := stages * virtual_stages * microbatches * kinds) > MAX_ACTIONS:
        raise SpecError(f"{size} actions are too many to prove an optimum for", "microbatches", f"{MAX_ACTIONS} actions or fewer")
    cp_model = _solver()
    place = Placement(placement, stages, virtual_stages, microbatches)
    shares = {"forward": forward, "backward": backward, "weight": weight}
    costs = Costs(**{k: whole_share(v, place, k) for k, v in shares.items()}, latency=p2p).checked(place)  # type: ignore[arg-type]
    limit = float(stages if cap is None else cap)
    problem = _Problem(cp_model, place, costs, limit, split, objective)
    start_name, start_table, start_value = _warm_start(place, costs, shares, p2p, limit, split, objective)
    if start_table is not None:
        problem.hint(replay(start_table, costs))
    begun = time.perf_counter()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = float(time_limit_s)
    solver.parameters.num_workers = int(workers)
    status = solver.solve(problem.model)
    seconds = time.perf_counter() - begun
    if status == cp_model.INFEASIBLE:
        raise SpecError(f"no order keeps {limit:g} microbatches in memory", "cap", "1")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if start_table is None:
            raise SpecError(f"no order found in {time_limit_s:g} s", "time_limit_s", "a longer limit")
        table, bound = start_table, problem.floor / problem.scale
    else:
        table, bound = problem.table(solver), max(solver.best_objective_bound, problem.floor) / problem.scale
    timeline = replay(table, costs)
    value = _value(timeline, objective)
    if start_table is not None and start_value < value - 1e-9:
        timeline, value = replay(start_table, costs), start_value
    proven = status == cp_model.OPTIMAL or value <= bound + 1e-9
    return Optimum(timeline, value, min(bound, value), proven, start_name, start_value, seconds, problem.exact)


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise SpecError("OR-tools is not installed", "optimal", "pip install 'trainwright[solve]'") from None
    return cp_model


def _value(timeline: Timeline, objective: str) -> float:
    if objective == "makespan":
        return timeline.makespan
    return float((timeline.end[timeline.nodes.first[1:] - 1] - timeline.start[timeline.nodes.first[:-1]]).max())


def _warm_start(
    place: Placement, costs: Costs, shares: dict[str, Any], p2p: float, cap: float, split: bool, objective: str
) -> tuple[str, ActionTable | None, float]:
    """The best known order with the same placement, under the cap; whole backwards are cut in two where the problem splits them."""
    for choice in candidates(place.ranks, place.microbatches, cap, **shares, p2p=p2p, objective=objective, virtual_stages=(place.chunks,)):
        table = choice.timeline.table
        same = table.placement.chunks == place.chunks and table.placement.kind == place.kind and not table.fused.any()
        if same and (split or not (table.kind == W).any()):
            order = _split(table) if split else table
            return choice.name, order, _value(replay(order, costs), objective)
    return "", None, math.inf


def _split(table: ActionTable) -> ActionTable:
    """Every B as I and W one after the other."""
    rows = []
    for r in range(table.placement.ranks):
        out: list[tuple[int, int, int, int]] = []
        for kind, stage, microbatch, fused in table.rows(r).tolist():
            out += [(I, stage, microbatch, 0), (W, stage, microbatch, 0)] if kind == B else [(kind, stage, microbatch, fused)]
        rows.append(np.array(out))
    return ActionTable.of(table.name, table.placement, rows)


def integers(values: np.ndarray) -> tuple[int, bool]:
    """The scale that makes every value whole (at most `MAX_SCALE`), and whether it does so exactly."""
    scale = 1
    for value in np.unique(values):
        scale = math.lcm(scale, Fraction(float(value)).limit_denominator(MAX_SCALE).denominator)
        if scale > MAX_SCALE:
            return max(1, int(MAX_SCALE / max(float(values.max()), 1e-12))), False
    return scale, bool(np.allclose(np.round(values * scale), values * scale, atol=1e-6))


class _Problem:
    """The CP-SAT model."""

    def __init__(self, cp_model: Any, place: Placement, costs: Costs, cap: float, split: bool, objective: str) -> None:
        self.place, self.split, self.model = place, split, cp_model.CpModel()
        self.kinds = (F, I, W) if split else (F, B)
        slow = np.asarray(costs.slowdown)[place.rank_of_stage[0]][:, None]
        gradient = np.asarray(costs.backward) + np.asarray(costs.recompute)
        seconds = {F: costs.forward, I: gradient, W: costs.weight, B: gradient + np.asarray(costs.weight)}
        real = {k: np.asarray(seconds[k]) * slow for k in self.kinds}
        everything = np.concatenate([*(r.ravel() for r in real.values()), [costs.message_seconds]])
        self.scale, self.exact = integers(everything)
        self.length = {k: np.rint(r * self.scale).astype(int) for k, r in real.items()}
        self.message = round(costs.message_seconds * self.scale)
        self.horizon = int(sum(r.sum() for r in self.length.values())) + 2 * place.stages * place.microbatches * self.message
        self.begin = {
            (k, s, n): self.model.new_int_var(0, self.horizon, f"{k}.{s}.{n}")
            for k in self.kinds
            for s in range(place.stages)
            for n in range(place.microbatches)
        }
        bound = lower_bound(place, costs, split)
        self.floor = math.floor((bound.makespan if objective == "makespan" else bound.span) * self.scale + 1e-6) if self.exact else 0
        self._precedences(costs)
        self._ranks(int(cap * place.chunks + 1e-9))
        self._objective(objective)

    def end(self, kind: int, stage: int, n: int) -> Any:
        return self.begin[kind, stage, n] + int(self.length[kind][stage, n])

    def _precedences(self, costs: Costs) -> None:
        rank, add, back = self.place.rank_of_stage[0], self.model.add, self.kinds[1]
        alike = all((np.asarray(r) == np.asarray(r)[:, :1]).all() for r in self.length.values())
        for s in range(self.place.stages):
            hop = self.message if s and rank[s] != rank[s - 1] else 0
            for n in range(self.place.microbatches):
                if s:
                    add(self.begin[F, s, n] >= self.end(F, s - 1, n) + hop)
                    add(self.begin[back, s - 1, n] >= self.end(back, s, n) + hop)
                else:
                    add(self.begin[back, self.place.stages - 1, n] >= self.end(F, self.place.stages - 1, n))
                if self.split:
                    add(self.begin[W, s, n] >= self.end(I, s, n))
                if n and alike:
                    for kind in self.kinds:
                        add(self.begin[kind, s, n] >= self.end(kind, s, n - 1))

    def _ranks(self, cap: int) -> None:
        last = self.kinds[-1]
        for rank in range(self.place.ranks):
            mine = [(s, n) for s in self.place.stages_of(rank) for n in range(self.place.microbatches)]
            self.model.add_no_overlap(
                [
                    self.model.new_fixed_size_interval_var(self.begin[k, s, n], int(self.length[k][s, n]), "")
                    for k in self.kinds
                    for s, n in mine
                ]
            )
            if cap < len(mine):
                held = []
                for s, n in mine:
                    size = self.model.new_int_var(0, self.horizon, "")
                    held.append(self.model.new_interval_var(self.begin[F, s, n], size, self.end(last, s, n), ""))
                self.model.add_cumulative(held, [1] * len(held), cap)

    def _objective(self, objective: str) -> None:
        target = self.model.new_int_var(self.floor, self.horizon, "objective")
        last = self.kinds[-1]
        for rank in range(self.place.ranks):
            mine = [(s, n) for s in self.place.stages_of(rank) for n in range(self.place.microbatches)]
            first: Any = 0
            if objective == "span":
                first = self.model.new_int_var(0, self.horizon, "")
                self.model.add_min_equality(first, [self.begin[F, s, n] for s, n in mine])
            for s, n in mine:
                self.model.add(target >= self.end(last, s, n) - first)
        self.model.minimize(target)

    def hint(self, start: Timeline) -> None:
        t = start.table
        for row, at in enumerate(start.row_start.tolist()):
            key = (int(t.kind[row]), int(t.stage[row]), int(t.microbatch[row]))
            if key in self.begin:
                self.model.add_hint(self.begin[key], round(at * self.scale))

    def table(self, solver: Any) -> ActionTable:
        rows: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in range(self.place.ranks)]
        for (kind, s, n), var in self.begin.items():
            at = solver.value(var)
            rows[self.place.rank_of_stage[0][s]].append((at, at + int(self.length[kind][s, n]), self.kinds.index(kind), kind, s, n))
        lists = [np.array([(k, s, n, 0) for _, _, _, k, s, n in sorted(r)]) for r in rows]
        return ActionTable.of("optimal", self.place, lists)
