"""Emitted sets started as they stand, and what has to be gone when a test ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.emit import Options

PROGRAMS = Path(__file__).parent / "programs"
CHOSEN = Options(script="train.py", learning_rate=1e-2, clip=0.5, weight_decay=0.1, betas=(0.9, 0.95))
LIMIT_S = 400


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: nothing can be run on it")


def environment(folder: Path, **more: str) -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    where = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return where | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "STARTED_BY": marker(folder, more.get("NODE", "0")),
        **more,
    }


def marker(folder: Path, number: str) -> str:
    return f"{folder}:{number}"


def end(folder: Path, number: str) -> None:
    """Kills everything that a script started, its workers too, which torchrun puts into sessions of their own: what a node takes with it."""
    wanted = f"STARTED_BY={marker(folder, number)}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in place.read_bytes().split(b"\0"):
                os.kill(int(place.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def started(words: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which ends with the block whatever became of it."""
    log = folder / f"log-{more.get('NODE', '0')}.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(folder, **more), stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            end(folder, more.get("NODE", "0"))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(folder: Path, engine: str = "", **more: str) -> str:
    """What the set's own launch script prints; `engine` tells the program what it runs on, where that takes a patch on a CPU."""
    with started(["bash", "launch.sh"], folder, ENGINES=engine, **more) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        text = (folder / "log-0.txt").read_text()
        assert process.returncode == 0, text[-4000:]
    return text
