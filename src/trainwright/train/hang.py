"""A hang, found and named: which rank did not come, to which collective, on which mesh axis.

PyTorch's flight recorder keeps the last collectives of every process group. A thread of each rank looks at the clock; when no step has ended for the run's
timeout, it writes down what its rank has enqueued and what is not done, and the first rank compares the notes: the rank that has none, or is behind, is it.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RECORDS = "2000"
PATIENCE_S = 3.0


def record_collectives() -> None:
    """Before the first process group is made: the flight recorder is on (its cost is a microsecond a collective)."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, RECORDS)


def note(step: int) -> dict[str, Any]:
    """What this rank has asked for: {group: {"enqueued", "completed"}} and the newest collectives that have not ended, by group."""
    recorder: Any = importlib.import_module("torch._C._distributed_c10d")  # not in PyTorch's own type stubs
    raw = json.loads(recorder._dump_fr_trace_json())
    groups: dict[str, dict[str, Any]] = {}
    for entry in raw.get("entries", []):
        name = entry["process_group"][1] if entry["process_group"][1] not in ("", "undefined") else entry["process_group"][0]
        kind = entry["profiling_name"].rpartition(":")[2].split(" ")[0]
        here = groups.setdefault(name, {"count": 0, "kind": "", "done": True, "bytes": 0})
        here["count"] += 1
        here["kind"] = kind
        here["sizes"] = entry["input_sizes"]
        here["done"] = bool(entry["retired"])
    status = raw.get("pg_status", {})
    by_id = {
        str(e["pg_id"]): (e["process_group"][1] if e["process_group"][1] not in ("", "undefined") else e["process_group"][0])
        for e in raw.get("entries", [])
    }
    for number, s in status.items():
        if number in by_id:
            groups[by_id[number]] |= {"enqueued": int(s["last_enqueued_collective"]), "completed": int(s["last_completed_collective"])}
    return {"step": step, "groups": groups}


def blame(notes: Mapping[int, Mapping[str, Any]], ranks: int, waited_s: float) -> str:
    """One line from the notes of the ranks that could write one."""
    step = min((n["step"] for n in notes.values()), default=0)
    pending: dict[str, list[tuple[int, Any]]] = {}
    for rank, n in sorted(notes.items()):
        for group, g in n["groups"].items():
            if g.get("enqueued", 0) > g.get("completed", 0) and not g["done"]:
                pending.setdefault(group, []).append((rank, g))
    silent = [r for r in range(ranks) if r not in notes]
    where = "no collective is open"
    if pending:
        group, waiting = max(pending.items(), key=lambda item: len(item[1]))
        where = f"{waiting[0][1]['kind']} over {group}"
        behind = [r for r, n in notes.items() if r not in [w for w, _ in waiting]]
        late = silent or behind
    else:
        late = silent
    who = f"rank {', '.join(map(str, late))}" if late else "every rank"
    doing = "did not come to" if pending and late else "waits in" if pending else "does not go on;"
    return f"step {step + 1}: nothing moved for {waited_s:.0f} s: {who} {doing} {where}"


class Watch:
    """The clock of one rank. `tick` after every step; `told` receives the line (on the lowest rank that is alive) before the process ends with status 1."""

    def __init__(self, folder: Path, rank: int, ranks: int, timeout_s: float, told: Callable[[str], None]) -> None:
        self.folder, self.rank, self.ranks, self.timeout_s, self.told = folder, rank, ranks, timeout_s, told
        self.last, self.step, self.running = time.monotonic(), 0, True
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self, step: int) -> None:
        self.step, self.last = step, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank-{self.rank}.json").unlink(missing_ok=True)
        self.thread.start()

    def tick(self, step: int) -> None:
        self.step, self.last = step, time.monotonic()

    def stop(self) -> None:
        self.running = False

    def _run(self) -> None:
        pause = min(1.0, self.timeout_s / 10)
        while self.running:
            time.sleep(pause)
            waited = time.monotonic() - self.last
            if self.running and waited > self.timeout_s:
                self.report(waited)
                os._exit(1)

    def report(self, waited_s: float) -> None:
        """Writes this rank's note; the first rank that has one waits for the others' and tells."""
        path = self.folder / f"rank-{self.rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(note(self.step)))
        os.replace(temporary, path)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and len(self._notes()) < self.ranks:
            time.sleep(0.1)
        notes = self._notes()
        if self.rank == min(notes, default=self.rank):
            self.told(blame(notes, self.ranks, waited_s))

    def _notes(self) -> dict[int, Any]:
        found = {}
        for path in self.folder.glob("rank-*.json"):
            try:
                found[int(path.stem.removeprefix("rank-"))] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
        return found
