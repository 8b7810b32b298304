"""What a trainer holds between backward and the optimizer's step, as whole tensors and as bytes: what layouts are compared by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .metrics import state_tensors
from .step import Trainer


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor that a layout splits, on every rank that holds a part of it."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind this rank's parts, each once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(part, torch.Tensor) and part.device.type != "meta":
            storage = part.untyped_storage()
            if storage.size():
                seen[storage.data_ptr()] = storage.size()
    return sum(seen.values())


class Watched(Trainer):
    """A trainer that remembers each step's gradients, before clipping and unscaled, and the bytes at that moment."""

    gradients: dict[str, torch.Tensor]
    resident: dict[str, int]
    keeps_gradients = True

    def _update(self) -> tuple[float, bool]:
        if self.keeps_gradients:
            self.gradients = self._gradients()
        weights = [p for _, p in self.named]
        self.resident = {
            "parameters": storage_bytes(weights),
            "gradients": storage_bytes(p.grad for p in weights if p.grad is not None),
        }
        found = super()._update()
        self.resident["optimizer"] = storage_bytes(state_tensors(self.optimizer))
        self.resident["master_weights"] = storage_bytes(p for _, p in self.masters.named) if self.masters else 0
        return found

    def _gradients(self) -> dict[str, torch.Tensor]:
        mine: dict[str, torch.Tensor] = {}
        for name, p in self.named:
            if p.grad is None:
                continue
            g = whole(p.grad) if p.grad.dim() else p.grad
            for axis in reversed(getattr(p, "split_axes", ())):  # each rank of the axis holds other experts
                parts = [torch.empty_like(g) for _ in range(self.axis_group(axis).size())]
                dist.all_gather(parts, g.contiguous(), group=self.axis_group(axis))
                g = torch.cat(parts)
            mine[name] = g.float() / self.scale
        return mine

    def axis_group(self, axis: str) -> Any:
        return self.ranks.group(axis)
