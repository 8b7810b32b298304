"""A user's own lists: PyTorch's per-rank CSV, read and written. One line a rank, ``0F0,0F1,0B0``; an empty cell is a
pause; ``(0F2;3B0)OVERLAP_F_B`` is an overlapped pair.

torchtitan runs such a file (`pipeline_parallel_schedule_csv`). Files that also hold messages (``1SEND_F0``,
``2RECV_B1``) are read too, and the order of their messages is checked.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np

from ..errors import SpecError, one_line
from .actions import Action, ActionTable, Placement, PlacementKind, rows_of
from .graph import compile_nodes, order_nodes
from .messages import Message, check_messages

_ACTION = re.compile(r"(\d{1,7})(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d{0,7})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMPUTE = ("F", "I", "W", "B")
MAX_ACTIONS = 4_000_000


def read_csv(source: str | Path, name: str = "") -> ActionTable:
    """Text or a file -> a checked table. Raises `SpecError` with rank and cell for what cannot be read, is missing,
    doubled, misplaced or deadlocks.
    """
    text, name = _text_of(source, name)
    programs: list[list[Action | Message]] = []
    for rank, line in enumerate(row for row in csv.reader(io.StringIO(text)) if row):
        programs.append([a for cell, word in enumerate(line) for a in _parse(word.strip(), f"{name}: rank {rank}, cell {cell}")])
        if sum(map(len, programs)) > MAX_ACTIONS:
            raise SpecError(f"more than {MAX_ACTIONS:,} actions", name)
    lists = [[a for a in program if isinstance(a, Action)] for program in programs]
    if not any(lists):
        raise SpecError("no action in it; expected one line a rank, like 0F0,0F1,0B0", name)
    rows = [rows_of(actions) for actions in lists]
    table = ActionTable.of(name, _placement(rows), rows)
    nodes = compile_nodes(table)
    order_nodes(nodes.first, nodes.needs, table, nodes.row)
    if any(isinstance(a, Message) for program in programs for a in program):
        check_messages(programs, table.placement)
    return table


def write_csv(table: ActionTable) -> str:
    """One line a rank, as PyTorch's `_load_csv` reads it (compute only: PyTorch adds the messages)."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in table.lists)


def _text_of(source: str | Path, name: str) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or "," in source):
        return source, name or "schedule"
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), name or one_line(path.name, 60)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SpecError(f"cannot read the schedule: {reason}", one_line(path, 120)) from None


def _parse(word: str, where: str) -> list[Action | Message]:
    if not word or word == "None":
        return []
    if pair := _PAIR.fullmatch(word):
        parts = tuple(a for w in pair[1].split(";") for a in _parse(w.strip(), where) if isinstance(a, Action))
        if [p.kind for p in parts] != ["F", "B"]:
            raise SpecError(f"{word[:60]!r} is not one forward and one whole backward", where, "(0F1;3B0)OVERLAP_F_B")
        return [Action("FB", parts[0].stage, parts[0].microbatch, parts)]
    found = _ACTION.fullmatch(word)
    if not found:
        raise SpecError(f"{word[:60]!r} is not an action", where, "stage, kind and microbatch, like 0F0, 3B1, 2I0, 2W0")
    stage, kind, microbatch = int(found[1]), found[2], found[3]
    if kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
        return []  # collectives are costs here, not places in the list
    if not microbatch:
        raise SpecError(f"{word[:60]!r} names no microbatch", where, f"{word}0")
    return [Action(kind, stage, int(microbatch)) if kind in _COMPUTE else Message(kind, stage, int(microbatch))]


def _placement(rows: list[np.ndarray]) -> Placement:
    """Where the stages are, from who runs their forwards."""
    ranks = len(rows)
    rank = np.repeat(np.arange(ranks), [len(r) for r in rows])
    flat = np.concatenate(rows)
    stages, microbatches = int(flat[:, 1].max()) + 1, int(flat[:, 2].max()) + 1
    if stages * microbatches > MAX_ACTIONS:
        raise SpecError(f"stage {stages - 1} of microbatch {microbatches - 1}: more than {MAX_ACTIONS:,} actions", "schedule")
    if stages % ranks:
        near = [x for x in (stages // ranks * ranks, -(-stages // ranks) * ranks) if x > 0]
        raise SpecError(
            f"{stages} stages on {ranks} ranks: every rank needs the same number",
            "schedule",
            [f"{n} stages" for n in near],
        )
    owner = np.full(stages, -1)
    stage, of = flat[::-1, 1], rank[::-1]
    owner[stage] = of  # of several, the first in the file wins; the others are then reported as misplaced
    if (owner < 0).any():
        raise SpecError(f"stage {int(np.flatnonzero(owner < 0)[0])} has no action", "schedule")
    chunks = stages // ranks
    kinds: tuple[PlacementKind, ...] = ("loop", "v", "bidirectional")
    for kind in kinds:
        if kind == "bidirectional" and (chunks != 1 or ranks < 2):
            continue
        place = Placement(kind, ranks, chunks, microbatches)
        if (place.rank_of(flat[:, 1], flat[:, 2]) == rank).all():
            return place
    mapping = tuple(owner.tolist())
    if mapping == tuple(Placement("loop", ranks, chunks, microbatches).rank_of_stage[0].tolist()):
        return Placement("loop", ranks, chunks, microbatches)
    return Placement("given", ranks, chunks, microbatches, mapping)
