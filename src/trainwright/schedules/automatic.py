"""A schedule made for given costs under a memory cap, and the trade-off of time against memory.

List scheduling in the manner of the zero-bubble heuristic (Qi et al. 2024, arXiv:2401.10241, section 3.1): whenever a rank is free it takes, of what
has arrived, an input gradient, a forward that memory allows, or a weight gradient that fills a hole; a few settings of the preferences are tried,
beside every schedule of the registry, and the quickest that keeps the cap wins.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..errors import SpecError
from . import SCHEDULES
from .actions import ActionTable, F, I, Placement, W
from .costs import Costs
from .replay import replay, schedule
from .timeline import Timeline


class Preference(NamedTuple):
    """`forward_first`: a ready forward goes before a ready input gradient until `ahead` microbatches are held; `deep`: the later chunk first;
    `patience`: the share of a weight gradient's time for which a rank rather waits for an arrival it knows of.
    """

    forward_first: bool
    deep: bool
    patience: float


@dataclass
class _Rank:
    """What a rank knows while the list is being made."""

    free: float = 0.0
    held: int = 0
    last: int = W


class _Maker:
    """One run of the list scheduler; `lists` are the rows that come out."""

    def __init__(self, place: Placement, costs: Costs, cap: int, prefer: Preference) -> None:
        self.place, self.costs, self.cap, self.prefer = place, costs, cap, prefer
        shape = (place.stages, place.microbatches)
        self.arrive = {F: np.full(shape, np.inf).tolist(), I: np.full(shape, np.inf).tolist()}
        self.arrive[F][0] = [0.0] * place.microbatches
        self.next = {kind: [0] * place.stages for kind in (F, I, W)}
        self.rank_of = place.rank_of_stage[0].tolist()
        self.of_rank = [sorted(place.stages_of(r), reverse=prefer.deep) for r in range(place.ranks)]
        self.ranks = [_Rank() for _ in range(place.ranks)]
        self.lists: list[list[tuple[int, int, int, int]]] = [[] for _ in range(place.ranks)]
        slow = np.asarray(costs.slowdown)[place.rank_of_stage[0]][:, None]
        cost = {F: costs.forward, I: np.asarray(costs.backward) + np.asarray(costs.recompute), W: costs.weight}
        self.seconds = {k: (np.asarray(v) * slow).tolist() for k, v in cost.items()}
        self.wake: list[tuple[float, int]] = [(0.0, r) for r in range(place.ranks)]

    def run(self) -> list[list[tuple[int, int, int, int]]]:
        while self.wake:
            now, rank = heapq.heappop(self.wake)
            if self.ranks[rank].free <= now + 1e-12 and (choice := self.choose(rank, now)) is not None:
                self.start(rank, now, *choice)
        return self.lists

    def ready(self, kind: int, rank: int, now: float) -> int:
        for stage in self.of_rank[rank]:
            n = self.next[kind][stage]
            if n < self.place.microbatches and self.arrive[kind][stage][n] <= now + 1e-12:
                spare = self.place.chunks - 1 - stage // self.place.ranks  # later chunks must still find room
                if kind == I or self.ranks[rank].held + 1 <= self.cap - spare:
                    return stage
        return -1

    def choose(self, rank: int, now: float) -> tuple[int, int] | None:
        me = self.ranks[rank]
        gradient, forward = self.ready(I, rank, now), self.ready(F, rank, now)
        if forward >= 0 and (gradient < 0 or (self.prefer.forward_first and me.last != F)):
            return F, forward
        if gradient >= 0:
            return I, gradient
        owed = [s for s in self.of_rank[rank] if self.next[W][s] < self.next[I][s]]
        if not owed:
            return None
        stage = max(owed)
        soon = now + self.prefer.patience * self.seconds[W][stage][self.next[W][stage]]
        return None if self.prefer.patience and self.coming(rank, now, soon) else (W, stage)

    def coming(self, rank: int, now: float, soon: float) -> bool:
        """Whether something is known to arrive after now and before `soon`."""
        for kind, stage in product((I, F), self.of_rank[rank]):
            n = self.next[kind][stage]
            room = kind == I or self.ranks[rank].held < self.cap
            if n < self.place.microbatches and room and now < self.arrive[kind][stage][n] < soon:
                return True
        return False

    def start(self, rank: int, now: float, kind: int, stage: int) -> None:
        me, n = self.ranks[rank], self.next[kind][stage]
        self.next[kind][stage] += 1
        self.lists[rank].append((kind, stage, n, 0))
        me.free = end = now + self.seconds[kind][stage][n]
        me.held += {F: 1, I: 0, W: -1}[kind]
        me.last = kind
        heapq.heappush(self.wake, (end, rank))
        last = self.place.stages - 1
        target = {F: stage + 1, I: stage - 1}.get(kind, -1)
        if kind == F and stage == last:
            self.arrive[I][last][n] = end
        elif 0 <= target <= last:
            there = self.rank_of[target]
            self.arrive[kind][target][n] = at = end + (self.costs.message_seconds if there != rank else 0.0)
            heapq.heappush(self.wake, (at, there))


def make(place: Placement, costs: Costs, cap: float, prefer: Preference) -> ActionTable:
    """One list schedule of split backwards under a cap in units of one rank's activations of one microbatch. Raises `SpecError` where the cap is
    below one microbatch.
    """
    chunks = int(cap * place.chunks + 1e-9)
    if chunks < place.chunks:
        raise SpecError(f"a cap of {cap:g} holds not even one microbatch", "cap", "1")
    checked = costs.checked(place)
    rows = _Maker(place, checked, chunks, prefer).run()
    return ActionTable.of("automatic", place, [np.array(r) for r in rows])


@dataclass(frozen=True)
class Choice:
    """One schedule of the search: what it is called, what it takes, what it needs."""

    name: str
    timeline: Timeline
    objective: float

    @property
    def peak(self) -> float:
        return max(self.timeline.peak_per_rank)


Share = float | Sequence[float]


def candidates(
    stages: int,
    microbatches: int,
    cap: float = float("inf"),
    forward: Share = 1.0,
    backward: Share = 2.0,
    weight: Share = 0.0,
    p2p: float = 0.0,
    objective: str = "makespan",
    weight_copies: int = 1,
    virtual_stages: Iterable[int] = (1, 2),
) -> list[Choice]:
    """Schedules that keep the cap (in units of one rank's activations of one microbatch), best first: the registry's and list schedules made for
    these costs.

    `objective` is makespan or span (the longest rank's own, for steps that flow into one another). Costs are whole shares of a rank. Two copies of
    the weights only where `weight_copies` is 2.
    """
    if objective not in ("makespan", "span"):
        raise SpecError(f"unknown objective {objective!r}", "objective", ["makespan", "span"])
    if not cap >= 1:
        raise SpecError(f"a cap of {cap!r} holds not even one microbatch", "cap", "1")
    shares = {"forward": forward, "backward": backward, "weight": weight, "p2p": p2p}
    chunks = tuple(virtual_stages)
    found = _registered(stages, microbatches, shares, objective, weight_copies, chunks) + _made(
        stages, microbatches, cap, shares, objective
    )
    return _kept(found, cap)


def _kept(found: Iterable[Choice], cap: float) -> list[Choice]:
    """Those that keep the cap, best first; of equals the one with less memory, then a named one."""
    kept = [c for c in found if c.peak <= cap + 1e-9]
    return sorted(kept, key=lambda c: (round(c.objective, 9), c.peak, c.name.startswith("automatic")))


Shares = Mapping[str, object]


def _registered(
    stages: int, microbatches: int, shares: Shares, objective: str, weight_copies: int, virtual_stages: Sequence[int]
) -> list[Choice]:
    """Every schedule of the registry that runs at this size."""
    found: list[Choice] = []
    for name, entry in SCHEDULES.items():
        if entry.weight_copies > weight_copies:
            continue
        for v in {"one": (1,), "two": (2,), "many": tuple(x for x in virtual_stages if x > 1)}[entry.chunks]:
            try:
                found.append(_choice(name, schedule(name, stages, microbatches, v, **shares), objective))  # type: ignore[arg-type]
            except SpecError:
                continue
    return found


def _made(stages: int, microbatches: int, cap: float, shares: Shares, objective: str) -> list[Choice]:
    """List schedules for one chunk a rank and for two in a V."""
    found: list[Choice] = []
    limit = min(cap, float(2 * stages))
    for kind, v in (("loop", 1), ("v", 2)):
        place = Placement(kind, stages, v, microbatches)  # type: ignore[arg-type]
        costs = schedule("gpipe" if v == 1 else "zb-v", stages, microbatches, v, **shares).costs  # type: ignore[arg-type]
        name = f"automatic ({'V' if v > 1 else 'one chunk'})"
        settings = map(Preference._make, product((False, True), (False, True) if v > 1 else (True,), (0.0, 0.5, 1.0)))
        found += [_choice(name, replay(make(place, costs, limit, s), costs), objective) for s in settings]
    return found


def _choice(name: str, timeline: Timeline, objective: str) -> Choice:
    span = float((timeline.end[timeline.nodes.first[1:] - 1] - timeline.start[timeline.nodes.first[:-1]]).max())
    return Choice(name, timeline, timeline.makespan if objective == "makespan" else span)


def automatic(stages: int, microbatches: int, cap: float = float("inf"), **costs: object) -> Choice:
    """The best of `candidates`. Raises `SpecError` where none keeps the cap."""
    found = candidates(stages, microbatches, cap, **costs)  # type: ignore[arg-type]
    if not found:
        raise SpecError(f"no schedule of {stages} ranks keeps {cap:g} microbatches", "cap", "a larger cap")
    return found[0]


def trade_off(stages: int, microbatches: int, caps: Iterable[float] = (), **costs: object) -> list[tuple[float, Choice]]:
    """(cap, best schedule) for rising caps, only where more memory buys time. Default caps: from one microbatch to 2p in half steps."""
    grid = sorted(caps) or [1 + k / 2 for k in range(4 * stages - 1)]
    objective, copies = str(costs.pop("objective", "makespan")), int(costs.pop("weight_copies", 1))  # type: ignore[call-overload]
    shares: Shares = {"forward": 1.0, "backward": 2.0, "weight": 0.0, "p2p": 0.0, **costs}
    named = _registered(stages, microbatches, shares, objective, copies, (2,))
    front: list[tuple[float, Choice]] = []
    for cap in grid:
        found = _kept(named + _made(stages, microbatches, cap, shares, objective), cap)
        if found and (not front or found[0].objective < front[-1][1].objective - 1e-9):
            front.append((cap, found[0]))
    return front
