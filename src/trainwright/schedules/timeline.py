"""What a replay found: when each action ran, the three bubbles by name, memory by rank, why ranks stood still, and
the chain of actions that set the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .actions import KINDS, ActionTable, B, F, W
from .costs import Costs
from .graph import Nodes

MAX_CHECKED = 20_000  # actions; the order of messages is looked at up to here
CAUSES = ("ramp", "dependency", "latency", "imbalance", "collective", "flush")


class Collective(NamedTuple):
    """A gather or reduction on a rank's collective lane."""

    rank: int
    kind: str
    stage: int
    start: float
    end: float


class Gap(NamedTuple):
    """A rank standing still from `start` to `end`: in the ramp, in a wait, or in the flush; `waits_for` is the row
    whose result it waits for (-1: none).
    """

    rank: int
    start: float
    end: float
    phase: str
    waits_for: int


@dataclass(frozen=True)
class Timeline:
    """`start`, `end` [nodes] in the costs' unit; `busy` [nodes] is the part that computes (a blocking send keeps a
    rank without computing).
    """

    nodes: Nodes
    costs: Costs
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    delays: np.ndarray | None
    collectives: tuple[Collective, ...] = ()
    weight_copies: int = 1

    def __repr__(self) -> str:
        what = f"{self.name}: {self.stages} ranks, {self.microbatches} micro-batches"
        return f"<Timeline {what}: makespan {self.makespan:g}, bubble {self.bubble_total:.1%} of all time>"

    @property
    def table(self) -> ActionTable:
        return self.nodes.table

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def stages(self) -> int:
        return self.table.placement.ranks

    @property
    def microbatches(self) -> int:
        return self.table.placement.microbatches

    @property
    def virtual_stages(self) -> int:
        return self.table.placement.chunks

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end, gradient reductions included."""
        last = max((c.end for c in self.collectives), default=0.0)
        return max(float(self.end.max(initial=0.0)), last)

    @cached_property
    def busy_per_rank(self) -> np.ndarray:
        return np.bincount(self.nodes.rank, weights=self.busy, minlength=self.stages)

    @property
    def useful(self) -> float:
        return float(self.busy_per_rank.sum())

    @property
    def idle(self) -> float:
        """Seconds of all ranks together in which they compute nothing."""
        return self.stages * self.makespan - self.useful

    @property
    def bubble_total(self) -> float:
        """idle / (ranks x makespan)."""
        return self.idle / (self.stages * self.makespan)

    @property
    def bubble_useful(self) -> float:
        """idle / useful work: what Megatron's paper calls the bubble fraction."""
        return self.idle / self.useful

    @cached_property
    def bubble_span_per_rank(self) -> np.ndarray:
        """1 - useful / (last end - first start of the same rank): the zero-bubble paper's measure; the ramp's stagger
        does not count.
        """
        span = self.end[self.nodes.first[1:] - 1] - self.start[self.nodes.first[:-1]]
        return 1.0 - self.busy_per_rank / span

    @property
    def bubble_span(self) -> float:
        return float(self.bubble_span_per_rank.max())

    @cached_property
    def peak_per_rank(self) -> list[float]:
        """Most activations a rank holds at once, from the start of F to the end of W, in the unit of
        `Costs.activations` (default: one rank's of one microbatch).
        """
        return peaks(self.table, np.asarray(self.costs.activations)).tolist()

    @property
    def messages(self) -> int:
        """Activations and gradients that cross from one rank to another."""
        return int(self.nodes.remote.sum())

    @cached_property
    def row_start(self) -> np.ndarray:
        return self.start[self.nodes.row_node]

    @cached_property
    def row_end(self) -> np.ndarray:
        return self.end[self.nodes.row_node]

    def memory_curve(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Times and the activations held from each of them on."""
        t = self.table
        rows = slice(t.first[rank], t.first[rank + 1])
        kind, held = t.kind[rows], np.asarray(self.costs.activations)[t.stage[rows]]
        change = np.where(kind == F, held, np.where((kind == W) | (kind == B), -held, 0.0))
        at = np.where(kind == F, self.row_start[rows], self.row_end[rows])
        return np.maximum.accumulate(at), np.maximum(np.cumsum(change), 0.0).round(9)  # a rank's list is in the order of time

    @cached_property
    def arrivals(self) -> np.ndarray:
        """[nodes, d]: when each thing waited for was there; -inf where nothing is waited for."""
        ends = np.append(self.end, -np.inf)[self.nodes.needs]
        return ends if self.delays is None else ends + self.delays

    @cached_property
    def gaps(self) -> list[Gap]:
        """Every stretch in which a rank computes nothing, in the order of ranks and time."""
        first, n, tiny = self.nodes.first, len(self.nodes), 1e-9 * max(self.makespan, 1e-300)
        before = np.concatenate([[0.0], self.end[:-1]])
        before[first[:-1]] = 0.0
        gap = np.flatnonzero(self.start - before > tiny)
        binding = np.argmax(self.arrivals, axis=1) if n else np.zeros(0, int)
        source = np.append(self.nodes.row, -1)[self.nodes.needs[np.arange(n), binding]]
        starts = set(first[:-1].tolist())
        rank = self.nodes.rank
        found = [
            Gap(
                int(rank[i]),
                float(before[i]),
                float(self.start[i]),
                "ramp" if int(i) in starts else "wait",
                int(source[i]),
            )
            for i in gap
        ]
        ends = self.end[first[1:] - 1]
        found += [Gap(r, float(e), self.makespan, "flush", -1) for r, e in enumerate(ends) if self.makespan - e > tiny]
        return sorted(found)

    @cached_property
    def critical_path(self) -> list[int]:
        """Rows of the chain that sets the makespan, first to last: each starts the moment its predecessor in the
        chain lets it.
        """
        if not len(self.nodes):
            return []
        node, path = int(np.argmax(self.end)), []
        tiny = 1e-9 * max(self.makespan, 1e-300)
        firsts = set(self.nodes.first[:-1].tolist())
        while True:
            path.append(int(self.nodes.row[node]))
            if self.start[node] <= tiny:
                return path[::-1]
            k = int(np.argmax(self.arrivals[node]))
            late = self.arrivals[node, k] >= self.start[node] - tiny
            if late and (self.nodes.remote[node, k] or node in firsts or self.end[node - 1] < self.start[node] - tiny):
                node = int(self.nodes.needs[node, k])
            elif node not in firsts and self.end[node - 1] >= self.start[node] - tiny:
                node -= 1
            else:  # it waited for a collective
                return path[::-1]

    @cached_property
    def idle_by_cause(self) -> dict[str, float]:
        """The idle time of all ranks, by what would have to go for it to go; sums to `idle`.

        `ramp`, `dependency` and `flush` (before a rank's first, between its, after its last actions) are what is left
        when every action of a kind costs the mean and messages take no time; `latency` is what messages add to that,
        `imbalance` what the real costs add, `collective` what gathers and reductions add. `imbalance` is negative
        where uneven stages happen to help.
        """
        from .replay import idle_by_cause

        return idle_by_cause(self)

    def label(self, row: int) -> str:
        t = self.table
        return f"{t.stage[row]}{KINDS[t.kind[row]]}{t.microbatch[row]}"

    def to_dict(self, actions: bool = False) -> dict[str, object]:
        """Plain numbers for JSON; with `actions` also every action's start and end."""
        out: dict[str, object] = {
            "schedule": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "virtual_stages": self.virtual_stages,
            "makespan": self.makespan,
            "bubble_total": self.bubble_total,
            "bubble_useful": self.bubble_useful,
            "bubble_span": self.bubble_span,
            "peak_per_rank": self.peak_per_rank,
            "weight_copies": self.weight_copies,
            "messages": self.messages,
            "busy_per_rank": self.busy_per_rank.tolist(),
            "idle": self.idle,
            "idle_by_cause": self.idle_by_cause,
            "critical_path": [self.label(r) for r in self.critical_path],
        }
        if len(self.table) <= MAX_CHECKED:
            from .messages import blocking_orders

            out["blocking_messages"] = blocking_orders(self.table)
        if actions:
            t = self.table
            out["actions"] = [
                {
                    "rank": int(t.rank[i]),
                    "kind": KINDS[t.kind[i]],
                    "stage": int(t.stage[i]),
                    "microbatch": int(t.microbatch[i]),
                    "start": s,
                    "end": e,
                    "overlapped": bool(f),
                }
                for i, (s, e, f) in enumerate(zip(self.row_start.tolist(), self.row_end.tolist(), _in_pair(t)))
            ]
            out["collectives"] = [c._asdict() for c in self.collectives]
        return out


def _in_pair(table: ActionTable) -> np.ndarray:
    return table.fused.astype(bool) | np.roll(table.fused.astype(bool), 1)


def peaks(table: ActionTable, activations: np.ndarray) -> np.ndarray:
    """Peak activations [ranks]. A rank's order alone decides it: what F keeps is held until W (or B) of the same
    chunk and microbatch.
    """
    same = bool(len(activations) == 0 or (activations == activations[0]).all())
    held = np.ones(len(table), np.int64) if same else activations[table.stage]
    change = np.where(table.kind == F, held, 0) - np.where((table.kind == W) | (table.kind == B), held, 0)
    running = np.cumsum(change)
    before = np.concatenate([[0], running])[table.first[:-1]]
    top = np.maximum.reduceat(running, table.first[:-1]) - before
    return top * (activations[0] if same else 1.0)
