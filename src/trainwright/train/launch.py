"""Starts a run and stays with it: writes its folder, starts torchrun in a session of its own, hands on signals, starts again what was killed, and knows how
it ended. Needs no torch itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SpecError, TrainwrightError, nearest
from ..resolve import Run
from .data.tokens import prepare
from .engines import engine_of
from .files import CHECKPOINTS, ERRORS, METRICS, OUTCOME, RUN, STOP_FILE, read_errors, read_events, read_json, write_json, write_text
from .ranks import KEEPS_FREED
from .scope import require_torch
from .settings import Settings
from .whole import latest_step

RANKS_PER_CORE = 4
GRACE_S = 20.0
LAUNCHED = "TRAINWRIGHT_LAUNCHED"


@dataclass(frozen=True)
class Place:
    """Where ranks run: `nodes` machines, this one being number `node`; they meet at `rendezvous` (host:port). `restarts` of the whole run are tried."""

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    restarts: int = 3


@dataclass(frozen=True)
class End:
    """How a run ended: ``done``, ``stopped`` (saved on request), ``failed`` or ``killed``; `status` is what the command exits with."""

    status: int
    word: str
    step: int | None = None
    loss: float | None = None
    saved: int | None = None
    message: str = ""


def write_folder(
    folder: Path, run: Run, settings: Settings, *, checkpoint: str | None = None, progress: Callable[[int], None] | None = None
) -> None:
    """Checks what can be checked without a rank, tokenizes the data, and writes ``run.json`` and the engine's files. Raises `SpecError`, `TrainwrightError`."""
    if run.job.seq_len > run.model.max_positions:
        raise SpecError(
            f"{run.job.seq_len:,} tokens, the model has {run.model.max_positions:,} positions",
            "training.seq_len",
            [run.model.max_positions],
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").write_text("")
        (folder / ".probe").unlink()
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror}", str(folder)) from None
    tokens = prepare(settings.data or "embedded", settings.tokenizer or None, run.model.vocab, folder / "data", progress=progress)
    for name, text in engine_of(run, settings).files(run, settings).items():
        write_text(folder / name, text)
    write_json(
        folder / RUN,
        {
            "spec": run.filled,
            "settings": settings.to_dict(),
            "tokens": str(tokens),
            "checkpoint": checkpoint,
            "threads": threads(run.plan.gpus),
        },
    )


def check_sources(run: Run, settings: Settings) -> None:
    """Raises `SpecError` where the ranks would for `settings.init` or `settings.model_from`: asked of one process that finds modules where they do."""
    if settings.init and not Path(settings.init).is_dir():
        raise SpecError("there is no such folder", "init", near_folders(Path(settings.init)))
    if not settings.init and not settings.model_from:
        return
    require_torch()
    with tempfile.TemporaryDirectory(prefix="trainwright-") as aside:
        question, answer = Path(aside) / "question.json", Path(aside) / "answer.json"
        write_json(question, {"spec": run.filled, "settings": settings.to_dict()})
        command = [sys.executable, "-m", "trainwright.train.sources", str(question), str(answer)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        found = read_json(answer) or {}  # none where that process ended otherwise: the ranks will say how
    if "error" in found:
        raise SpecError(found["error"])


def near_folders(path: Path) -> list[str]:
    """Folders beside a path that does not exist, by likeness of name."""
    with contextlib.suppress(OSError):
        return nearest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
    return []


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return there if visible is None else min(there, len([v for v in visible.split(",") if v.strip()]))


def threads(ranks: int) -> int:
    return max(1, cores() // ranks)


def check_place(run: Run, settings: Settings, place: Place) -> int:
    """Ranks of this machine. Raises `SpecError` where it has too few devices, or the port or host of the rendezvous does not serve."""
    total = run.plan.gpus
    if not 0 <= place.node < place.nodes:
        raise SpecError(f"there is no machine {place.node} of {place.nodes}: they count from 0", "--node", [place.nodes - 1])
    if total % place.nodes:
        raise SpecError(
            f"{total} ranks do not divide over {place.nodes} machines", "--nodes", [n for n in range(1, total + 1) if total % n == 0][:8]
        )
    here = total // place.nodes
    on_gpu = uses_gpu(settings)
    if on_gpu and here > gpus():
        raise SpecError(
            f"the plan needs {here} GPUs of this machine, it has {gpus()} (--dry-run builds one rank of it on fake tensors)", "train"
        )
    most = RANKS_PER_CORE * cores()
    if not on_gpu and here > most:
        raise SpecError(
            f"the plan needs {here} ranks on this machine, its {cores()} cores carry at most {most} (--dry-run builds one rank of it on fake tensors)",
            "train",
        )
    if place.nodes > 1:
        check_rendezvous(place)
    return here


def uses_gpu(settings: Settings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and gpus() > 0)


def endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SpecError(f"{text[:60]!r} is not HOST:PORT", "--rendezvous", ["10.0.0.1:29500"])
    return host, int(port)


def check_rendezvous(place: Place, patience_s: float = 60.0) -> None:
    """Machine 0 must be able to listen there, the others to reach it within `patience_s`."""
    host, port = endpoint(place.rendezvous)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpecError(f"the host {host!r} is not known: {error.strerror or error}", "--rendezvous") from None
    if place.node == 0:
        with socket.socket(address[0], socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, port))
            except OSError as error:
                why = "the port is in use" if error.errno == 98 else f"cannot listen there: {error.strerror}"
                raise SpecError(
                    f"{place.rendezvous}: {why}", "--rendezvous", [f"{host}:{free_port(host)}"] if error.errno == 98 else []
                ) from None
        return
    end = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=2.0):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise SpecError(f"nobody answers at {place.rendezvous}: {error.strerror or error}", "--rendezvous") from None
            time.sleep(0.5)


def free_port(host: str) -> int:
    with contextlib.suppress(OSError), socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])
    return 0


def torchrun_arguments(folder: Path, ranks: int, place: Place) -> list[str]:
    """What one starts by hand with ``torchrun`` instead."""
    meet = ["--standalone"]
    if place.nodes > 1:
        meet = ["--nnodes", str(place.nodes), "--node-rank", str(place.node), "--rdzv-backend", "c10d"]
        meet += ["--rdzv-endpoint", place.rendezvous, "--rdzv-id", folder.name, "--rdzv-conf", "timeout=120,join_timeout=120"]
    return [
        *meet,
        *("--nproc-per-node", str(ranks), "--max-restarts", str(place.restarts), "--monitor-interval", "0.2"),
        *("--log-dir", str(folder / "logs"), "--redirects", "3", "-m", "trainwright.train.worker", str(folder)),
    ]


@dataclass
class Launch:
    """One run on this machine. `see(event)` gets every new line of its metrics; `environment` is added to the ranks'."""

    folder: Path
    ranks: int
    place: Place
    see: Callable[[dict[str, Any]], None] = lambda event: None
    environment: Mapping[str, str] = field(default_factory=dict)
    heard: list[int] = field(default_factory=list)
    at: int = 0

    def run(self) -> End:
        """Until the run has ended. Starts the launcher (`agent`) again where it was killed itself; ends no later than shortly after a second signal."""
        require_torch()
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        (self.folder / OUTCOME).unlink(missing_ok=True)
        shutil.rmtree(self.folder / ERRORS, ignore_errors=True)
        self.at = (self.folder / METRICS).stat().st_size if (self.folder / METRICS).is_file() else 0
        with self._listening():
            for attempt in range(self.place.restarts + 1):
                status = self._torchrun()
                if status >= 0 or self.heard or read_json(self.folder / OUTCOME) or attempt == self.place.restarts:
                    break
                self.see({"event": "warning", "message": f"the launcher was killed (signal {-status}); starting it again"})
        return self._end(status)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def hear(number: int, frame: Any) -> None:
            self.heard.append(number)
            with contextlib.suppress(OSError):
                (self.folder / STOP_FILE).touch()  # every rank looks for it once a step, on every machine that shares the folder

        before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _torchrun(self) -> int:
        """torchrun's exit status, negative for a signal. Nothing that it started is alive after."""
        (self.folder / "logs").mkdir(exist_ok=True)
        environment = {
            **({} if gpus() else KEEPS_FREED),
            **os.environ,
            **self.environment,
            LAUNCHED: "1",
            "OMP_NUM_THREADS": str(threads(self.ranks)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", "trainwright.train.agent", *torchrun_arguments(self.folder, self.ranks, self.place)]
        with (self.folder / "logs" / "torchrun.log").open("ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                return self._wait(child)
            finally:
                if child.poll() is None:
                    child.kill()  # its ranks follow it (survive.die_with_parent)
                    child.wait()

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        failed_at: float | None = None
        while True:
            status = child.poll()
            self._look()
            if status is not None:
                return status
            if len(self.heard) > 1:
                return -signal.SIGKILL
            if failed_at is None and any(e["final"] for e in read_errors(self.folder)):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                return -signal.SIGKILL
            time.sleep(0.1)

    def _look(self) -> None:
        events, self.at = read_events(self.folder, self.at)
        for event in events:
            self.see(event)

    def _end(self, status: int) -> End:
        self._look()
        outcome = read_json(self.folder / OUTCOME)
        errors = read_errors(self.folder)
        if outcome is not None and not any(e["final"] for e in errors):
            return End(0, str(outcome["status"]), outcome["step"], outcome["loss"], outcome["saved"])
        saved = latest_step(self.folder / CHECKPOINTS)
        if errors and errors[0]["final"]:
            return End(int(errors[0]["status"]), "failed", None, None, saved, str(errors[0]["message"]))
        if self.heard:
            return End(128 + self.heard[0], "killed", None, None, saved, "ended by a second signal, without saving")
        return End(1, "failed", None, None, saved, self._why(errors, status))

    def _why(self, errors: list[dict[str, Any]], status: int) -> str:
        """The best line there is for a run that was not ended by an error of its own."""
        named = [str(e["message"]) for e in errors if not str(e["message"]).startswith("the connection to another rank")]
        if named:
            return named[0]
        with contextlib.suppress(OSError):
            log = (self.folder / "logs" / "torchrun.log").read_text(errors="replace")
            if how := failed_rank(log):
                return f"{how}, and {self.place.restarts} restarts are used up; see {self.folder / 'logs'}"
            if "RendezvousTimeoutError" in log or "RendezvousConnectionError" in log:
                return f"the other machines did not come to {self.place.rendezvous} in time"
        return (
            str(errors[0]["message"]) if errors else f"the launcher ended with status {status}; see {self.folder / 'logs' / 'torchrun.log'}"
        )


def resume_command(folder: Path) -> str:
    return f"trainwright train --resume {folder}"


def settings_of(base: Mapping[str, Any], said: Mapping[str, Any]) -> Settings:
    """Settings of a file or of an earlier run, with what was said on top."""
    try:
        return Settings.from_dict({**base, **said})
    except TypeError as error:
        raise TrainwrightError(f"settings: {error}") from None


def failed_rank(log: str) -> str | None:
    """The rank that torchrun's table of failures blames: one that was killed, if any, since the others only lost their connection to it."""
    found = [(int(rank), int(code)) for rank, code in re.findall(r"rank +: (\d+) \(.*\n +exitcode +: (-?\d+)", log)]
    if not found:
        return None
    rank, code = min(found, key=lambda f: (f[1] >= 0, f[0]))
    return f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} ended with status {code}"
