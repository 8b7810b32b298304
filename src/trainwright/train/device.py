"""What this machine trains on: device, backend, and the settings that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..errors import SpecError
from .settings import Settings


@dataclass(frozen=True)
class Machine:
    """`kind` cpu or cuda; `backend` of torch.distributed; whether copies can be pinned, AdamW fused, blocks compiled."""

    kind: str
    backend: str
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def pinned(self) -> bool:
        return self.kind == "cuda"

    def allocated(self) -> tuple[int, int, int] | None:
        """Peak allocated and reserved bytes, and what the whole device holds now; None where the machine does not count."""
        if self.kind != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.index)
        return torch.cuda.max_memory_allocated(self.index), torch.cuda.max_memory_reserved(self.index), total - free


def devices() -> int:
    """GPUs of this machine, 0 where training runs on the CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(settings: Settings) -> Machine:
    """The machine of this process (LOCAL_RANK says which GPU), with PyTorch set up for it."""
    wanted = settings.device if settings.device != "auto" else "cuda" if devices() else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise SpecError(f"no device {wanted[:40]!r}", "device", ["auto", "cpu", "cuda"])
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if wanted == "cpu":
        return Machine("cpu", "gloo")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= devices():
        raise SpecError(f"rank {index} of this machine has no GPU: it has {devices()}", "device", [f"at most {devices()} processes a node"])
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32 beside 16-bit products
    return Machine("cuda", "cpu:gloo,cuda:nccl", index)
