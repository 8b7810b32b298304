"""Sums of gradients that no wrapper makes: of a pipeline after its list, of experts that some ranks hold and others do not, of weights that ranks share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..cost.traffic.buckets import BUCKET_BYTES, FIRST_BYTES, MIB
from ..spec.plan import ParallelPlan
from .mesh import Ranks
from .modules import Experts
from .optimizer import settle


def cap_of(plan: ParallelPlan) -> int | None:
    """The plan's ``bucket_cap_mb``; None: DistributedDataParallel's own, whose first bucket is smaller."""
    given = dict(plan.structure.options).get("bucket_cap_mb", "auto")
    return int(given) if isinstance(given, (int, float)) else None


@dataclass
class Turn:
    """Where a part stands in its step: whether gradients are summed over ranks with the next backward pass, as FSDP2's `set_requires_gradient_sync` says."""

    sums: bool = True


class Sums:
    """A module's weights that every rank of a group has and uses on its own part of the tokens or heads: their gradients are summed once a step.

    Each weight is used once a pass. What passes before the one that sums leave is kept here, in fp32; the sum is back in autograd's hands before FSDP2 reduces
    it, and before any wrapper sees the gradient.
    """

    def __init__(self, group: dist.ProcessGroup, turn: Turn) -> None:
        self.group, self.turn = group, turn
        self.kept: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return Summed.apply(weight, name, self)

    def take(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """This pass's gradient -> that of all passes and ranks, zeros where more passes are to come: FSDP2 wants all of a group's gradients alike."""
        kept = self.kept.pop(name, None)
        if not self.turn.sums:
            self.kept[name] = gradient.float() if kept is None else kept.add_(gradient)
            return torch.zeros_like(gradient)
        total = gradient.contiguous() if kept is None else kept.add_(gradient).to(gradient.dtype)
        dist.all_reduce(total, group=self.group)
        return total


class Summed(torch.autograd.Function):
    """Identity, whose gradient goes through `Sums.take`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, name: str, sums: Sums) -> torch.Tensor:
        ctx.name, ctx.sums = name, sums
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.sums.take(ctx.name, gradient), None, None


def sum_gradients(parts: Iterable[nn.Module], ranks: Ranks) -> None:
    """The mean over the data axes of every gradient that FSDP2, `replicate` or DDP does not reduce, each part's by itself; an expert's: `Ranks.expert_uses`."""
    size, cap = ranks.data.size(), cap_of(ranks.plan)
    for part in parts:
        if hasattr(part, "set_requires_gradient_sync"):
            continue
        spread = {id(p): p for m in part.modules() if isinstance(m, Experts) and ranks.spreads_experts for p in m.parameters()}
        if size > 1:
            all_reduce_gradients([p for p in part.parameters() if id(p) not in spread], ranks.data.get_group(), 1 / size, cap)
        if spread:
            all_reduce_gradients(list(spread.values()), ranks.expert_data.get_group(), 1 / ranks.expert_uses, cap)


def all_reduce_gradients(parameters: list[nn.Parameter], group: Any, factor: float = 1.0, cap_mb: int | None = None) -> None:
    """Sums gradients over a group, times `factor`, in DistributedDataParallel's buckets: from the last parameter, each closed by what fills it."""
    bucket: list[torch.Tensor] = []
    size, limit, cap = 0, *((cap_mb * MIB,) * 2 if cap_mb else (FIRST_BYTES, BUCKET_BYTES))

    def flush() -> None:
        if not bucket:
            return
        flat = torch.cat([g.reshape(-1) for g in bucket])
        if dist.get_world_size(group) > 1:
            dist.all_reduce(flat, group=group)
        flat.mul_(factor)
        for g, piece in zip(bucket, flat.split([g.numel() for g in bucket])):
            g.copy_(piece.view_as(g))
        bucket.clear()

    for p in reversed(parameters):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        settle(p)
        g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if bucket and bucket[0].dtype != g.dtype:
            flush()
            size = 0
        bucket.append(g)
        size += g.numel() * g.element_size()
        if size >= limit:
            flush()
            size, limit = 0, cap
    flush()
