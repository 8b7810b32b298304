"""What a run tells: one JSON line an event in ``metrics.jsonl``, and the same numbers to TensorBoard where it is installed and asked for.

Rank 0 writes; whoever shows a run (the command line, a page, `tail -f`) reads the file. Nothing is ever rewritten: a run that is resumed appends, and the
last line of a step counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import TrainwrightError
from .files import METRICS


class Metrics:
    """Appends events. `enabled` is rank 0. Raises `TrainwrightError` where the folder cannot be written."""

    def __init__(self, folder: Path, enabled: bool, tensorboard: bool = False) -> None:
        self.file: Any = None
        self.board: Any = None
        if not enabled:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise TrainwrightError(f"metrics cannot be written: {error.strerror} ({error.filename})") from None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise TrainwrightError("TensorBoard is not installed: pip install tensorboard") from None
            self.board = SummaryWriter(str(folder / "tensorboard"))

    def tell(self, event: str, **values: Any) -> None:
        if self.file is None:
            return
        row = {"event": event, "time": round(time.time(), 3), **{k: plain(v) for k, v in values.items()}}
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainwrightError(f"metrics cannot be written: {error.strerror} ({self.file.name})") from None
        if self.board is not None and event == "step":
            for name, value in row.items():
                if isinstance(value, (int, float)) and name not in ("step", "time"):
                    self.board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        for each in (self.file, self.board):
            if each is not None:
                each.close()


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages behind tensors (of a DTensor, this rank's part)."""
    seen = {}
    for t in tensors:
        local = t.to_local() if hasattr(t, "to_local") else t
        if isinstance(local, torch.Tensor):
            storage = local.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Every tensor that this rank's optimizer keeps (ZeroRedundancyOptimizer: of its own share)."""
    for state in getattr(getattr(optimizer, "optim", optimizer), "state", {}).values():
        if isinstance(state, Mapping):
            yield from (v for v in state.values() if isinstance(v, torch.Tensor))


def memory_by_kind(modules: Iterable[nn.Module], optimizers: Iterable[Any], gradients: int | None = None) -> dict[str, int]:
    """Bytes this rank holds: parameters, gradients, optimizer; and the device's peak (CUDA's allocator, or the process's resident set on a CPU)."""
    parameters = [p for m in modules for p in m.parameters()]
    found = {
        "parameters": tensor_bytes(parameters),
        "gradients": tensor_bytes(p.grad for p in parameters if p.grad is not None) if gradients is None else gradients,
        "optimizer": tensor_bytes(v for o in optimizers for v in state_tensors(o)),
    }
    return found | peak_bytes()


def peak_bytes() -> dict[str, int]:
    if torch.cuda.is_available():
        return {"peak_allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    import resource

    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOP/s of this device's matrix products, the best of a few: what MFU is a share of where no catalogue knows the device (a CPU). Laid out as a linear
    layer's, since on a CPU the other way is up to ten times slower in 16 bits."""
    n = 512 if device.type == "cpu" else 4096
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or not best:
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best
