"""Gloo ranks that live as long as the test session: one process start for a world size, then many cases, each a named function with arguments.

`Workers(4)("layouts:train", "gpt", {"dp": 4})` runs `layouts.train("gpt", {"dp": 4})` on four ranks and returns their four answers. A rank that raises makes
the call raise `RankError` with every rank's traceback; a rank that stays silent makes it raise within `timeout_s`. After either the ranks are started
anew by the next call, since nobody knows what they still wait for. Ranks die with the process that started them, whatever kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

STARTUP_S = 240.0  # a machine may be shared
COLLECTIVE_S = 30.0  # what a lone rank waits for its neighbors
PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """What the ranks said, each with its number."""


class Workers:
    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.ranks: list[Connection] = []

    def __call__(self, function: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        if self.process is None:
            self._start()
        for rank in self.ranks:
            rank.send((function, args, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + (timeout_s or self.timeout_s)
        while len(answers) < self.size and (left := end - time.monotonic()) > 0:
            for rank in wait([r for i, r in enumerate(self.ranks) if i not in answers], left):
                assert isinstance(rank, Connection)
                try:
                    answers[self.ranks.index(rank)] = rank.recv()
                except EOFError:
                    answers[self.ranks.index(rank)] = False, "the process is gone"
            if any(not ok for ok, _ in answers.values()):
                end = min(end, time.monotonic() + 3)  # the others wait for the one that raised
        if len(answers) == self.size and all(ok for ok, _ in answers.values()):
            return [answers[i][1] for i in range(self.size)]
        self.stop()
        said = {i: answers.get(i, (False, "no answer")) for i in range(self.size)}
        raise RankError(function + "\n" + "\n".join(f"rank {i}: {text}" for i, (ok, text) in said.items() if not ok))

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address = f"{self.folder.name}/socket"
        try:
            with Listener(address, "AF_UNIX", backlog=self.size) as listener:
                self.process = subprocess.Popen(
                    [sys.executable, __file__, address, str(self.size), f"{self.folder.name}/store"],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
                    stdout=sys.stderr.fileno() if hasattr(sys.__stderr__, "fileno") else None,
                    start_new_session=True,
                )
                listener._listener._socket.settimeout(STARTUP_S)  # type: ignore[attr-defined]
                found = [listener.accept() for _ in range(self.size)]
        except TimeoutError:
            self.stop()  # once the listener has removed its socket from the folder that goes here
            raise RankError(f"{self.size} ranks did not start within {STARTUP_S:g} s") from None
        numbered = {rank.recv(): rank for rank in found}
        self.ranks = [numbered[i] for i in range(self.size)]

    def stop(self) -> None:
        if self.process is None:
            return
        for rank in self.ranks:
            rank.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process, self.ranks = None, []
        self.folder.cleanup()


# --- in the ranks ----------------------------------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(address: str, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from trainwright.train.caches import forget_world

    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as parent:
        parent.send(rank)
        for case in itertools.count():
            try:
                function, args, kwargs = parent.recv()
            except EOFError:
                return
            module, name = function.split(":")
            # A world of its own for every case: each group is a few threads and sockets, which live until the world ends.
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{store}-{case}", size),
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=COLLECTIVE_S),
            )
            try:
                answer = True, getattr(importlib.import_module(module), name)(*args, **kwargs)
            except Exception:
                answer = False, traceback.format_exc()
            if answer[0]:
                gc.collect()
                dist.destroy_process_group()
                forget_world()
            parent.send(answer)


def main(address: str, size: int, store: str) -> None:
    """Imports once, then becomes the ranks."""
    die_with_parent()
    import layouts  # noqa: F401  what every case needs, imported before the processes part

    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            die_with_parent()
            try:
                serve(address, rank, size, store)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
