"""A virtual world of ranks: each runs the same program on its own arrays, and whatever passes between them is moved and counted.

A rank's program is plain SPMD code (``y = rank.group("tp").all_reduce(x @ w)``). Ranks run one at a time, each until it has to wait, in a fixed
order, so a run is deterministic and a deadlock is found at once and named. Arrays are copied when they travel: no rank ever sees another's memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecError, TrainwrightError
from .collectives import Array, Send, all_gather, all_to_all, broadcast, max_reduce, reduce_scatter, ring_all_reduce, tree_all_reduce


class DeadlockError(TrainwrightError):
    """Every rank waits for another one."""


class _AbortedError(BaseException):
    """Another rank failed; this one stops quietly."""


class Key(NamedTuple):
    """What a counter counts: the sending rank, the purpose (``tp``, ``dp grad``) and the collective."""

    rank: int
    tag: str
    kind: str


@dataclass
class Count:
    """What one rank sent for one purpose."""

    bytes_sent: int = 0
    messages: int = 0
    calls: int = 0


@dataclass
class Traffic:
    """Every byte and message that was moved, by sender, purpose and collective."""

    counts: dict[Key, Count] = field(default_factory=dict)

    def at(self, rank: int, tag: str, kind: str) -> Count:
        return self.counts.setdefault(Key(rank, tag, kind), Count())

    def bytes_by_rank(self, tag: str | None = None, kind: str | None = None) -> dict[int, int]:
        """Bytes sent by each rank, optionally of one purpose or one collective only."""
        total: dict[int, int] = {}
        for key, count in self.counts.items():
            if (tag is None or key.tag == tag) and (kind is None or key.kind == kind):
                total[key.rank] = total.get(key.rank, 0) + count.bytes_sent
        return total

    def by_purpose(self) -> dict[tuple[str, str], dict[int, int]]:
        """{(tag, kind): {rank: bytes sent}}."""
        table: dict[tuple[str, str], dict[int, int]] = {}
        for key, count in self.counts.items():
            row = table.setdefault((key.tag, key.kind), {})
            row[key.rank] = row.get(key.rank, 0) + count.bytes_sent
        return table

    @property
    def total_bytes(self) -> int:
        return sum(c.bytes_sent for c in self.counts.values())

    @property
    def messages(self) -> int:
        return sum(c.messages for c in self.counts.values())


class _Meeting:
    """One collective call: what each member brought, and what each takes away."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.result: list[Any] | None = None


class World:
    """`size` ranks, numbered from 0. `run` starts one program on all of them and returns what each returned."""

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise SpecError(f"a world needs at least one rank, found {size!r}", "ranks", "1")
        self.size = size
        self.traffic = Traffic()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._mail: dict[tuple[int, int, Any], deque[Array]] = {}
        self._waiting: dict[int, str] = {}
        self._ready: deque[int] = deque()
        self._failure: BaseException | None = None

    # --- running -------------------------------------------------------------------------------------------------------------------------------

    def run(self, program: Callable[[Rank], Any]) -> list[Any]:
        """`program(rank)` on every rank; the results in rank order. The first error of any rank stops all and is raised here."""
        if self.size == 1:
            return [program(Rank(self, 0))]
        results: list[Any] = [None] * self.size
        self._batons = [threading.Semaphore(0) for _ in range(self.size)]
        self._done, self._lock, self._alive = threading.Event(), threading.Lock(), self.size
        self._ready, self._failure = deque(range(self.size)), None

        def body(index: int) -> None:
            try:
                self._batons[index].acquire()
                if self._failure is None:
                    results[index] = program(Rank(self, index))
            except _AbortedError:
                pass
            except BaseException as error:
                self._fail(error)
            finally:
                self._finish()

        threads = [threading.Thread(target=body, args=(i,), daemon=True, name=f"rank {i}") for i in range(self.size)]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._done.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _finish(self) -> None:
        with self._lock:
            self._alive -= 1
            last = self._alive == 0
        if last:
            self._done.set()
        elif self._failure is None:
            self._pass_on()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            for baton in self._batons:
                baton.release()

    def _pass_on(self) -> None:
        if self._ready:
            self._batons[self._ready.popleft()].release()
        elif self._waiting:
            stuck = "; ".join(f"rank {r} waits for {what}" for r, what in sorted(self._waiting.items()))
            self._fail(DeadlockError(f"deadlock: {stuck}"))

    def wait(self, rank: int, what: str) -> None:
        """Called by a rank that cannot go on: the next ready one runs until `wake(rank)` and its turn."""
        if self.size == 1:
            raise DeadlockError(f"deadlock: rank 0 waits for {what}")
        self._waiting[rank] = what
        self._pass_on()
        self._batons[rank].acquire()
        if self._failure is not None:
            raise _AbortedError

    def wake(self, rank: int) -> None:
        if rank in self._waiting:
            del self._waiting[rank]
            self._ready.append(rank)

    # --- moving --------------------------------------------------------------------------------------------------------------------------------

    def carry(self, source: int, target: int, array: Array, tag: str, kind: str) -> Array:
        """A copy of `array` at `target`, counted at `source`. An empty array sends no message."""
        if source == target or array.size == 0:
            return array.copy()
        count = self.traffic.at(source, tag, kind)
        count.bytes_sent += array.nbytes
        count.messages += 1
        return array.copy()

    def meet(
        self, ranks: tuple[int, ...], serial: int, rank: int, kind: str, tag: str, brought: Any, work: Callable[..., list[Any]]
    ) -> Any:
        """The meeting point of a collective: the last member to come does the work, the others wait."""
        meeting = self._meetings.setdefault((ranks, serial), _Meeting(kind))
        if meeting.kind != kind:
            raise DeadlockError(f"rank {rank} calls {kind} where others of group {list(ranks)} call {meeting.kind}")
        meeting.brought[rank] = brought
        self.traffic.at(rank, tag, kind).calls += 1
        if len(meeting.brought) < len(ranks):
            while meeting.result is None:
                missing = [r for r in ranks if r not in meeting.brought]
                self.wait(rank, f"{kind} ({tag}) with ranks {missing}")
        else:
            del self._meetings[ranks, serial]
            meeting.result = work(lambda i, j, a: self.carry(ranks[i], ranks[j], a, tag, kind), [meeting.brought[r] for r in ranks])
            for member in ranks:
                self.wake(member)
        return meeting.result[ranks.index(rank)]

    def post(self, source: int, target: int, key: Any, array: Array, tag: str) -> None:
        self.traffic.at(source, tag, "send_recv").calls += 1
        self._mail.setdefault((source, target, key), deque()).append(self.carry(source, target, array, tag, "send_recv"))
        self.wake(target)

    def collect(self, source: int, target: int, key: Any) -> Array:
        while not self._mail.get((source, target, key)):
            self.wait(target, f"{key} from rank {source}")
        return self._mail[source, target, key].popleft()


class Rank:
    """What a program sees of the world: its own number, and groups to talk to."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self._groups: dict[tuple[int, ...], Group] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of these ranks (this one among them); the same object every time."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = Group(self, key)
        return self._groups[key]

    def send(self, target: int, array: Array, key: Any = "message", tag: str = "p2p") -> None:
        """Hand an array to another rank; does not wait (a buffered, asynchronous send)."""
        self.world.post(self.index, target, key, array, tag)

    def receive(self, source: int, key: Any = "message") -> Array:
        """Wait for the array that `source` sends under this key."""
        return self.world.collect(source, self.index, key)


class Group:
    """Ranks that call collectives together. A group of one moves and counts nothing."""

    def __init__(self, rank: Rank, ranks: tuple[int, ...]) -> None:
        if rank.index not in ranks:
            raise SpecError(f"rank {rank.index} is not in group {list(ranks)}", "group")
        self.rank, self.ranks = rank, ranks
        self.size, self.me = len(ranks), ranks.index(rank.index)
        self._serial = 0

    def _meet(self, kind: str, tag: str, brought: Any, work: Callable[..., list[Any]]) -> Any:
        self._serial += 1
        return self.rank.world.meet(self.ranks, self._serial, self.rank.index, kind, tag, brought, work)

    def all_reduce(self, array: Array, tag: str = "", algorithm: str = "ring") -> Array:
        """The sum over the group, the same bits on every member."""
        if self.size == 1:
            return array
        work = ring_all_reduce if algorithm == "ring" else tree_all_reduce
        return self._meet("all_reduce", tag, np.asarray(array), work)

    def all_reduce_max(self, array: Array, tag: str = "") -> Array:
        """The elementwise maximum over the group."""
        return array if self.size == 1 else self._meet("all_reduce", tag, array, max_reduce)

    def all_gather(self, array: Array, tag: str = "") -> list[Array]:
        """Every member's array, in group order; sizes may differ."""
        return [array] if self.size == 1 else self._meet("all_gather", tag, array, all_gather)

    def reduce_scatter(self, pieces: Sequence[Array], tag: str = "") -> Array:
        """Piece `me` summed over the group, out of one piece for each member; sizes may differ."""
        return pieces[0] if self.size == 1 else self._meet("reduce_scatter", tag, list(pieces), reduce_scatter)

    def all_to_all(self, pieces: Sequence[Array], tag: str = "") -> list[Array]:
        """Piece j goes to member j; returns what each member sent here."""
        return list(pieces) if self.size == 1 else self._meet("all_to_all", tag, list(pieces), all_to_all)

    def broadcast(self, array: Array | None, root: int = 0, tag: str = "") -> Array:
        """Member `root`'s array on every member."""
        if self.size == 1:
            return np.asarray(array)
        n = self.size
        return self._meet("broadcast", tag, array, lambda send, arrays: broadcast(send, arrays[root], n, root))

    def shift(self, arrays: Sequence[Array], tag: str = "") -> list[Array]:
        """Each member's arrays to the next one round the ring; returns those of the member before."""
        if self.size == 1:
            return list(arrays)
        n = self.size

        def work(send: Send, brought: list[Sequence[Array]]) -> list[Any]:
            moved = [[send(i, (i + 1) % n, a) for a in brought[i]] for i in range(n)]
            return [moved[(i - 1) % n] for i in range(n)]

        return self._meet("send_recv", tag, list(arrays), work)
