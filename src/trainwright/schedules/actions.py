"""The one form of a pipeline schedule: every rank's ordered list of actions.

An action is F (forward), B (whole backward), I (input gradient), W (weight gradient) or FB (a forward and a backward
run as one overlapped piece) of one microbatch on one stage. A *stage* is a piece of the model (a chunk); with `v`
chunks a rank there are ``p * v`` stages. Which rank runs a stage is the `Placement`. `ActionTable` holds the lists of
all ranks as columns, so that a quarter of a million actions are built, checked and replayed in array operations;
`ActionTable.lists` gives the same as `Action` objects for whoever executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ..errors import SpecError

MAX_ACTIONS = 20_000_000
KINDS = ("F", "I", "W", "B")
F, I, W, B = range(4)  # noqa: E741 - the field's own letter
PlacementKind = Literal["loop", "v", "bidirectional", "given"]
Rows = np.ndarray
"""One rank's list: int array [n, 4] of kind, stage, microbatch, fused (1: this F and the B in the next row are one FB
action).
"""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work. `parts` holds the F and the B of an "FB"; stage and microbatch are then those of its F."""

    kind: str
    stage: int
    microbatch: int
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Placement:
    """Which rank runs which stage.

    `loop` deals stages round robin (stage s on rank s mod p), `v` goes down and comes back (0..p-1, then p-1..0,
    ...), `bidirectional` keeps two copies: the first half of the microbatches flows 0..p-1, the second half p-1..0.
    `given` has the rank of each stage in `mapping`. `rank_of_stage` is int [streams, stages].
    """

    kind: PlacementKind
    ranks: int
    chunks: int
    microbatches: int
    mapping: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def streams(self) -> int:
        return 2 if self.kind == "bidirectional" else 1

    @cached_property
    def rank_of_stage(self) -> np.ndarray:
        stage = np.arange(self.stages)
        down = stage % self.ranks
        if self.kind == "bidirectional":
            return np.stack([down, self.ranks - 1 - down])
        if self.kind == "given":
            down = np.array(self.mapping)
        elif self.kind == "v":
            down = np.where((stage // self.ranks) % 2 == 0, down, self.ranks - 1 - down)
        return down[None]

    def stream_of(self, microbatch: np.ndarray | int) -> np.ndarray:
        return np.asarray(microbatch) * self.streams // self.microbatches

    def rank_of(self, stage: np.ndarray | int, microbatch: np.ndarray | int) -> np.ndarray:
        if self.streams == 1:
            return self.rank_of_stage[0, np.asarray(stage)]
        return self.rank_of_stage[self.stream_of(microbatch), np.asarray(stage)]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds weights of, in the order of the model."""
        return sorted({int(s) for row in self.rank_of_stage for s in np.flatnonzero(row == rank)})


@dataclass(frozen=True)
class ActionTable:
    """The lists of all ranks, one after another. `first` [p + 1]: rank r owns rows first[r]..first[r+1]. Columns as
    in `Rows`.
    """

    name: str
    placement: Placement
    first: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    fused: np.ndarray

    @classmethod
    def of(cls, name: str, placement: Placement, rows: Sequence[Rows]) -> ActionTable:
        first = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        flat = np.concatenate([np.asarray(r, dtype=np.int64).reshape(-1, 4) for r in rows]) if rows else np.zeros((0, 4), np.int64)
        columns = (np.ascontiguousarray(c) for c in flat.T)
        return cls(name, placement, first, *columns)

    def __len__(self) -> int:
        """Rows; an FB action counts as the two pieces of work that it holds."""
        return len(self.kind)

    @cached_property
    def rank(self) -> np.ndarray:
        return np.repeat(np.arange(self.placement.ranks), np.diff(self.first))

    @cached_property
    def action_count(self) -> int:
        return len(self) - int(self.fused.sum())

    def rows(self, rank: int) -> Rows:
        part = slice(self.first[rank], self.first[rank + 1])
        return np.stack([self.kind[part], self.stage[part], self.microbatch[part], self.fused[part]], axis=1)

    @cached_property
    def lists(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's list as `Action` objects."""
        return tuple(tuple(_actions(self.rows(r))) for r in range(self.placement.ranks))


def _actions(rows: Rows) -> Iterable[Action]:
    waiting: Action | None = None
    for kind, stage, microbatch, fused in rows.tolist():
        action = Action(KINDS[kind], stage, microbatch)
        if fused:
            waiting = action
        elif waiting is not None:
            yield Action("FB", waiting.stage, waiting.microbatch, (waiting, action))
            waiting = None
        else:
            yield action


def rows_of(actions: Iterable[Action]) -> Rows:
    """`Action` objects -> columns. Raises `SpecError` for a kind that does not exist."""
    out: list[tuple[int, int, int, int]] = []
    for action in actions:
        pieces = action.parts or (action,)
        for n, piece in enumerate(pieces):
            if piece.kind not in KINDS:
                raise SpecError(f"unknown kind of action {piece.kind!r}", str(action), [*KINDS, "FB"])
            out.append((KINDS.index(piece.kind), piece.stage, piece.microbatch, int(n + 1 < len(pieces))))
    return np.array(out, dtype=np.int64).reshape(-1, 4)


class Ends(NamedTuple):
    """Micro-batches that the end stages have in flight at most, each on its own rank, where all are so at once with the rank's own most: `first` and `last`
    from their forward to their weight gradient, `loss` those of the last stage to their input gradient, with which the loss goes.
    """

    first: np.ndarray | int
    last: np.ndarray | int
    loss: np.ndarray | int


@dataclass(frozen=True)
class Schedule:
    """An entry of the registry.

    `order(p, m, v, r)` gives the rows of rank r. `rule(p, m, v)` raises `SpecError` where the schedule has no such
    order. `in_flight(p, m, v, r)` is the closed form of rank r's peak, in units of one rank's activations of one
    microbatch, over arrays; None where there is none (it is then counted on the list). `ends(p, m, v)` is that of `Ends`.
    `period(p)`: microbatches after which the middle of every rank's list
    repeats itself (None: it does not). `reach`: microbatches per
    stage beyond which the peak does not grow, for those without a closed form.
    """

    name: str
    doc: str
    source: str
    order: Callable[[int, int, int, int], Rows]
    placement: PlacementKind = "loop"
    aliases: tuple[str, ...] = ()
    rule: Callable[[int, int, int], None] = field(default=lambda p, m, v: None)
    chunks: Literal["one", "two", "many"] = "one"
    splits_backward: bool = False
    overlaps: bool = False
    weight_copies: int = 1
    in_flight: Callable[..., np.ndarray] | None = None
    ends: Callable[..., tuple[np.ndarray | int, np.ndarray | int, np.ndarray | int]] | None = None
    reach: int = 4
    torch_class: str | None = None
    period: Callable[[int], int] | None = None
    all_ranks: Callable[[int, int, int], Sequence[Rows]] | None = None

    @property
    def default_chunks(self) -> int:
        return 1 if self.chunks == "one" else 2

    def check(self, stages: int, microbatches: int, virtual_stages: int) -> None:
        """Raises `SpecError` with the reason and the nearest legal values."""
        for name, value in (("stages", stages), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise SpecError(f"{str(value)[:40]!r} is not a whole number of at least 1", name, "1")
        v = virtual_stages
        if self.chunks == "one" and v != 1:
            raise SpecError(f"{self.name} keeps one chunk a rank, not {v}", "virtual_stages", "1, or the schedule interleaved-1f1b")
        if self.chunks == "two" and v != 2:
            raise SpecError(f"{self.name} needs exactly two chunks a rank (down the ranks and back), not {v}", "virtual_stages", "2")
        if self.chunks == "many" and v < 2:
            raise SpecError(f"{self.name} needs two chunks a rank or more, not {v}", "virtual_stages", "2")
        self.rule(stages, microbatches, virtual_stages)

    def table(self, stages: int, microbatches: int, virtual_stages: int | None = None) -> ActionTable:
        """Every rank's list for `stages` ranks of `virtual_stages` chunks. Raises `SpecError` where the schedule has
        none.
        """
        v = self.default_chunks if virtual_stages is None else virtual_stages
        if isinstance(stages, int) and stages > MAX_ACTIONS // 2:  # before a rule looks for the nearest legal numbers of so many
            raise SpecError(f"more than {MAX_ACTIONS:,} actions", "stages", [MAX_ACTIONS // 2])
        self.check(stages, microbatches, v)
        most = MAX_ACTIONS // (2 * stages * v)
        require(
            microbatches <= most, f"more than {MAX_ACTIONS:,} actions", "microbatches" if most else "stages", [most or MAX_ACTIONS // 2]
        )
        place = Placement(self.placement, int(stages), int(v), int(microbatches))
        if self.all_ranks is not None:
            rows = self.all_ranks(stages, microbatches, v)
        else:
            rows = [self.order(stages, microbatches, v, r) for r in range(stages)]
        return ActionTable.of(self.name, place, rows)


def require(condition: bool, message: str, where: str, nearest: Iterable[object] = ()) -> None:
    """Raises `SpecError(message, where, nearest)` unless the condition holds."""
    if not condition:
        raise SpecError(message, where, nearest)
