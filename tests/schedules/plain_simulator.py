"""A second, slow and plain simulator: one action at a time, dictionaries, no arrays. The replay must say the same."""

from __future__ import annotations

from trainwright.schedules.actions import Action, ActionTable


def simulate(table: ActionTable, seconds, latency: float = 0.0, overlap: float = 1.0) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Start and end of every piece of work by (kind, stage, microbatch); `seconds(kind, stage, microbatch)` is its
    cost. Raises RuntimeError on a deadlock.
    """
    place = table.placement
    lists = [list(actions) for actions in table.lists]
    clock = [0.0] * place.ranks
    times: dict[tuple[str, int, int], tuple[float, float]] = {}
    arrived: dict[tuple[str, int, int], float] = {}

    def needs(a: Action) -> list[tuple[str, int, int]]:
        if a.kind == "F":
            return [("F", a.stage - 1, a.microbatch)] if a.stage else []
        if a.kind == "W":
            return [("b", a.stage, a.microbatch)]
        return [("b", a.stage + 1, a.microbatch)] if a.stage + 1 < place.stages else [("F", a.stage, a.microbatch)]

    def when(rank: int, need: tuple[str, int, int]) -> float:
        other = int(place.rank_of(need[1], need[2]))
        return arrived[need] + (latency if other != rank else 0.0)

    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(lists):
            while todo:
                pieces = todo[0].parts or (todo[0],)
                waits = [n for piece in pieces for n in needs(piece)]
                if any(n not in arrived for n in waits):
                    break
                start = max([clock[rank], *(when(rank, n) for n in waits)])
                parts = [seconds(a.kind, a.stage, a.microbatch) for a in pieces]
                length = max(sum(parts) * (overlap if len(pieces) > 1 else 1.0), *parts, 0.0)
                clock[rank] = start + length
                for a in pieces:
                    times[a.kind, a.stage, a.microbatch] = (start, clock[rank])
                    arrived["F" if a.kind == "F" else "W" if a.kind == "W" else "b", a.stage, a.microbatch] = clock[rank]
                todo.pop(0)
                moved = True
    if any(lists):
        raise RuntimeError("deadlock")
    return times


def peak(table: ActionTable, rank: int) -> float:
    """Activations held by a rank at its worst moment, counted along its list."""
    held = most = 0
    for action in table.lists[rank]:
        for piece in action.parts or (action,):
            held += {"F": 1, "I": 0, "W": -1, "B": -1}[piece.kind]
            most = max(most, held)
    return most / table.placement.chunks
