"""``python -m trainwright.train.extensions FusedAdamBuilder ...``: compiles DeepSpeed's extensions in this one process; the last line printed is
``name=file`` of each, with ``;`` between.

PyTorch's loader marks a folder in which it compiles by a file ``lock`` that nobody removes after a kill: all later processes wait for it without end. Here a
lock of the system's, which ends with its process, stands around the work; what it finds behind a killed process of its own it removes, and a foreign
``lock`` when nothing has been written beside it for ten minutes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STALE_S = 600.0


@contextmanager
def alone(folder: Path, stale_s: float = STALE_S, pause_s: float = 0.5) -> Iterator[None]:
    """No other process of ours compiles in `folder`, and nothing dead is in the way."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    with (folder / ".trainwright").open("a+") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.seek(0)
        if mark.read():  # a process of ours began here and did not end
            lock.unlink(missing_ok=True)
        while lock.exists() and time.time() - newest(folder) < stale_s:
            time.sleep(pause_s)
        lock.unlink(missing_ok=True)
        mark.truncate(0)
        mark.write(str(os.getpid()))
        mark.flush()
        try:
            yield
        finally:
            mark.truncate(0)


def newest(folder: Path) -> float:
    """When something in the folder was last written, our own mark aside."""
    return max((p.stat().st_mtime for p in folder.iterdir() if p.name != ".trainwright"), default=0.0)


def loaded(name: str, file: str) -> Any:
    """A compiled extension as a module, without PyTorch's loader and its lock."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_all(builders: list[str]) -> dict[str, str]:
    """{name: file} of each. Raises what the compiler raises."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    found = {}
    for each in builders:
        builder = get_accelerator().create_op_builder(each)
        with alone(Path(_get_build_directory(builder.name, False))):
            found[builder.name] = str(builder.load(verbose=False).__file__)
    return found


if __name__ == "__main__":
    made = compile_all(sys.argv[1:])
    print(";".join(f"{name}={file}" for name, file in made.items()))
