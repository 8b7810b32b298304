"""The folder of a run, and what processes tell each other through it. Needs no torch.

run.json       the filled run spec, the settings, the token file: what every rank reads
metrics.jsonl  one line an event
outcome.json   how it ended
errors/        one file a rank that failed
checkpoints/   see `checkpoint`
data/          the token file made from text
logs/          what the ranks and torchrun printed
traces/        of --profile
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SpecError, TrainwrightError

RUN, OUTCOME, ERRORS, CHECKPOINTS, METRICS = "run.json", "outcome.json", "errors", "checkpoints", "metrics.jsonl"
STOP_FILE = "stop"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """The whole file or nothing."""
    write_text(path, json.dumps(document, indent=1))


def write_text(path: Path, text: str) -> None:
    """The whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainwrightError(f"{path}: cannot be written: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no whole document."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_run(folder: Path) -> dict[str, Any]:
    """``run.json``. Raises `SpecError` where the folder is none of a run."""
    found = read_json(folder / RUN)
    if found is None or not {"spec", "settings", "tokens"} <= set(found):
        raise SpecError("is no folder of a run (it has no whole run.json)", str(folder))
    return found


def write_error(folder: Path, rank: int, attempt: int, message: str, *, final: bool, status: int, step: int | None = None) -> None:
    """`final`: starting again would end the same way. `status` is what the command exits with."""
    place = folder / ERRORS
    place.mkdir(parents=True, exist_ok=True)
    write_json(
        place / f"attempt-{attempt:04d}-rank-{rank:05d}.json",
        {"rank": rank, "message": message, "final": final, "status": status, "step": step},
    )


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """Those that are final first, then by attempt (newest first) and rank."""
    paths = sorted((folder / ERRORS).glob("attempt-*.json"))
    newest = sorted(paths, key=lambda p: (-int(p.name[8:12]), p.name))
    found = [e for e in map(read_json, newest) if e is not None]
    return sorted(found, key=lambda e: not e.get("final"))


def read_events(folder: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of ``metrics.jsonl`` from byte `start` on, and where to go on; a line that is still being written waits."""
    try:
        with (folder / METRICS).open("rb") as f:
            f.seek(start)
            data = f.read()
    except OSError:
        return [], start
    end = data.rfind(b"\n") + 1
    rows = []
    for line in data[:end].splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, start + end
