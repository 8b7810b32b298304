"""Some ranks on this machine for a moment: processes that run one function together and hand back what rank 0 found. For measuring, not for training.

Each is ``python -m <module> FOLDER``; ``FOLDER/request.json`` says what to do, ``FOLDER/answer.json`` is written by rank 0, and a rank that fails leaves
``FOLDER/error-<rank>.txt``. A file store in the folder joins them, so no port is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import TrainwrightError, one_line

# glibc hands what is freed back to the system and faults it in again page by page, although every step wants the same tensors once more.
KEEPS_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class RankFailed(TrainwrightError):
    """A rank ended without an answer; ``str()`` has its own last line."""


def run_ranks(module: str, request: dict[str, Any], ranks: int, timeout_s: float, threads: int = 1) -> Any:
    """What rank 0 answers, as plain JSON. All ranks end with this call, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
        place = Path(folder)
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        environment = {**KEEPS_FREED, **os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")) if p)
        with open(place / "log", "wb") as log:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", module, folder],
                    env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for r in range(ranks)
            ]
            try:
                _wait(place, started, timeout_s)
            finally:
                _end(started)
        return json.loads((place / "answer.json").read_text(encoding="utf-8"))


def _wait(place: Path, started: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while any(p.poll() is None for p in started):
        failed = [i for i, p in enumerate(started) if p.poll() not in (None, 0)]
        if failed or time.monotonic() > end:
            break
        time.sleep(0.02)
    if all(p.poll() == 0 for p in started) and (place / "answer.json").exists():
        return
    time.sleep(0.2)  # the others' reasons
    reasons = sorted(place.glob("error-*.txt"), key=lambda f: f.stat().st_mtime_ns)
    if reasons:
        raise RankFailed(f"rank {reasons[0].stem.removeprefix('error-')}: {one_line(reasons[0].read_text(encoding='utf-8'), 400)}")
    if time.monotonic() > end:
        raise RankFailed(f"the ranks did not answer in {timeout_s:.0f} s")
    last = (place / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RankFailed(f"a rank ended without an answer: {one_line(last[-1], 300) if last else 'it said nothing'}")


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for p in started:
        if p.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
        p.wait()


@contextlib.contextmanager
def joined(folder: str, backend: str, timeout_s: float = 60.0) -> Iterator[tuple[int, int]]:
    """(rank, ranks) of an initialized process group."""
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    try:
        yield rank, ranks
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def answer(work: Callable[[str, dict[str, Any]], Any]) -> int:
    """The main function of a rank's module: `work` of (folder, request); rank 0's result is the answer."""
    folder = sys.argv[1]
    place, rank = Path(folder), os.environ["RANK"]
    try:
        found = work(folder, json.loads((place / "request.json").read_text(encoding="utf-8")))
    except Exception as error:
        import traceback

        traceback.print_exc()
        (place / f"error-{rank}.txt").write_text(
            f"{type(error).__name__}: {error}" if not isinstance(error, TrainwrightError) else str(error)
        )
        return 1
    if rank == "0":
        part = place / "answer.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.rename(place / "answer.json")
    return 0
