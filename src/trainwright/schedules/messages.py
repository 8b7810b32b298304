"""Messages between ranks: where each rank sends and receives, and whether ranks end up waiting for each other.

Semantics are a rendezvous: a send ends when the receiver has reached the matching receive, and the other way round,
as with blocking NCCL point-to-point. Messages from one rank to another carry no tag, so both ends must list them in
the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import SpecError
from .actions import Action, ActionTable, Placement
from .graph import compile_nodes, order_nodes, sweep


class Message(NamedTuple):
    """One end of a message, in PyTorch's words: `kind` SEND_F, RECV_F, SEND_B or RECV_B of `stage` (the stage that
    sends or receives) and `microbatch`.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def other(self) -> Message:
        """The other end."""
        step = 1 if self.kind in ("SEND_F", "RECV_B") else -1
        verb = "RECV" if self.kind.startswith("SEND") else "SEND"
        return Message(f"{verb}{self.kind[4:]}", self.stage + step, self.microbatch)


Program = Sequence[Action | Message]


def with_messages(table: ActionTable) -> list[list[Action | Message]]:
    """Every rank's list with its sends and receives, in an order that cannot deadlock even where both ends block.

    Both ends of a message stand where it happens in one order of the whole step (the order in which producers end at
    unit cost): the earliest event that has not happened can then always happen.
    """
    nodes = compile_nodes(table)
    end = sweep(order_nodes(nodes.first, nodes.needs, table, nodes.row), np.ones(len(nodes)), None)
    place = table.placement
    programs: list[list[tuple[tuple[float, int, int], Action | Message]]] = [[] for _ in range(place.ranks)]
    position = 0
    for rank, actions in enumerate(table.lists):
        for action in actions:
            node = position
            position += 1
            programs[rank].append(((float(end[node]), 0, node), action))
            for piece in action.parts or (action,):
                if message := _sent(piece, place):
                    target = int(place.rank_of(message.other.stage, piece.microbatch))
                    key = (float(end[node]), 1, node)
                    programs[rank].append((key, message))
                    programs[target].append((key, message.other))
    return [[item for _, item in sorted(p, key=lambda x: x[0])] for p in programs]


def receive_before_use(table: ActionTable, together: bool = False) -> list[list[tuple[Action | Message, ...]]]:
    """The naive program: send right after computing, receive right before use; steps of a rank, each a tuple of what
    is posted at once.

    `together`: the send after one action and the receive before the next are posted in one call (Megatron's
    send_forward_recv_backward).
    """
    place = table.placement
    programs = []
    for actions in table.lists:
        steps: list[tuple[Action | Message, ...]] = []
        pending: tuple[Message, ...] = ()
        for action in actions:
            wanted = tuple(m for piece in action.parts or (action,) if (m := _received(piece, place)))
            steps += [pending + wanted] if together else [(m,) for m in pending + wanted]
            steps.append((action,))
            pending = tuple(m for piece in action.parts or (action,) if (m := _sent(piece, place)))
        steps.append(pending)
        programs.append([s for s in steps if s])
    return programs


def _sent(action: Action, place: Placement) -> Message | None:
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
    other = action.stage + step
    if (
        not step
        or not 0 <= other < place.stages
        or place.rank_of(other, action.microbatch) == place.rank_of(action.stage, action.microbatch)
    ):
        return None
    return Message("SEND_F" if step > 0 else "SEND_B", action.stage, action.microbatch)


def _received(action: Action, place: Placement) -> Message | None:
    step = {"F": -1, "B": 1, "I": 1}.get(action.kind, 0)
    other = action.stage + step
    if (
        not step
        or not 0 <= other < place.stages
        or place.rank_of(other, action.microbatch) == place.rank_of(action.stage, action.microbatch)
    ):
        return None
    return Message("RECV_F" if step < 0 else "RECV_B", action.stage, action.microbatch)


def blocking_orders(table: ActionTable) -> dict[str, str]:
    """What happens when messages block and receives stand right before their use: "fine", or the reason why not, where each is posted by itself and where
    the send after an action and the receive before the next are posted together. Where neither is fine, `with_messages` has an order that is.
    """
    found = {}
    for name, together in (("one by one", False), ("send and receive together", True)):
        try:
            check_messages(receive_before_use(table, together), table.placement)
            found[name] = "fine"
        except SpecError as error:
            found[name] = error.message
    return found


def check_messages(programs: Sequence[Program | Sequence[tuple[Action | Message, ...]]], place: Placement) -> None:
    """Raises `SpecError` where an end of a message is missing or doubled, is on the wrong rank, comes before its
    result or after its use, overtakes another, or where ranks wait for each other.
    """
    steps = [[s if isinstance(s, tuple) and not isinstance(s, Message) else (s,) for s in p] for p in programs]
    _check_ends(steps, place)
    at = [0] * len(steps)
    open_ops = [set(_messages(p[0])) if p else set() for p in steps]
    owner = {m: r for r, p in enumerate(steps) for step in p for m in _messages(step)}
    moving = list(range(len(steps)))
    while moving:
        rank = moving.pop()
        while at[rank] < len(steps[rank]):
            for message in list(open_ops[rank]):
                peer = owner[message.other]
                if message.other in open_ops[peer]:
                    open_ops[rank].discard(message)
                    open_ops[peer].discard(message.other)
                    moving.append(peer)
            if open_ops[rank]:
                break
            at[rank] += 1
            open_ops[rank] = set(_messages(steps[rank][at[rank]])) if at[rank] < len(steps[rank]) else set()
    stuck = [r for r, p in enumerate(steps) if at[r] < len(p)]
    if stuck:
        raise _waiting(stuck[0], open_ops, owner, at)


def _messages(step: tuple[Action | Message, ...]) -> list[Message]:
    return [m for m in step if isinstance(m, Message)]


def _check_ends(steps: Sequence[Sequence[tuple[Action | Message, ...]]], place: Placement) -> None:
    where: dict[Message, tuple[int, int]] = {}
    for rank, program in enumerate(steps):
        done: dict[tuple[str, int, int], int] = {}
        for n, step in enumerate(program):
            for item in step:
                if isinstance(item, Message):
                    if item in where:
                        raise SpecError(f"{item} is there twice", f"rank {rank}, step {n}", "once")
                    where[item] = (rank, n)
                    if item.kind.startswith("SEND") and not done.get((item.kind[-1], item.stage, item.microbatch)):
                        raise SpecError(f"{item} comes before what it sends is computed", f"rank {rank}, step {n}")
                    continue
                for piece in item.parts or (item,):
                    done[
                        (
                            "F" if piece.kind == "F" else "B" if piece.kind in "BI" else "W",
                            piece.stage,
                            piece.microbatch,
                        )
                    ] = 1
                    want = _received(piece, place)
                    if want and want not in where:
                        raise SpecError(f"{piece} comes before {want}", f"rank {rank}, step {n}", f"{want} before it")
    pairs: dict[tuple[int, int], dict[str, list[tuple[int, Message]]]] = defaultdict(lambda: {"SEND": [], "RECV": []})
    for message, (rank, n) in where.items():
        if message.other not in where:
            raise SpecError(f"{message} has no {message.other}", f"rank {rank}, step {n}", str(message.other))
        peer = where[message.other][0]
        sends = message.kind.startswith("SEND")
        pairs[(rank, peer) if sends else (peer, rank)]["SEND" if sends else "RECV"].append((n, message))
    for (source, target), ends in pairs.items():
        out = [m for _, m in sorted(ends["SEND"], key=lambda x: x[0])]
        into = [m.other for _, m in sorted(ends["RECV"], key=lambda x: x[0])]
        for a, b in zip(out, into):
            if a != b:
                raise SpecError(
                    f"rank {source} sends {a} where rank {target} expects {b}: it would take the wrong tensor",
                    f"rank {target}",
                    str(a),
                )


def _waiting(rank: int, open_ops: list[set[Message]], owner: dict[Message, int], at: list[int]) -> SpecError:
    ring: list[tuple[int, Message]] = []
    while rank not in [r for r, _ in ring]:
        message = min(open_ops[rank]) if open_ops[rank] else None
        if message is None:
            break
        ring.append((rank, message))
        rank = owner[message.other]
    text = "; ".join(f"rank {r} waits at {m} for rank {owner[m.other]}" for r, m in ring[:6])
    return SpecError(
        f"deadlock: {text}",
        f"rank {ring[0][0]}, step {at[ring[0][0]]}",
        "receives posted before or together with the sends",
    )
