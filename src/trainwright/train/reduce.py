"""Sums of gradients that no wrapper makes: of a pipeline after its list, of experts that some ranks hold and others do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .mesh import Ranks
from .modules import Experts
from .optimizer import settle

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's


def sum_gradients(parts: Iterable[nn.Module], ranks: Ranks) -> None:
    """The mean over the data axes of every gradient that FSDP2 or `replicate` does not reduce; an expert's over the ranks that hold it."""
    size = ranks.data.size()
    for part in parts:
        experts = {id(p): p for m in part.modules() if isinstance(m, Experts) for p in m.parameters()} if ranks.plan.ep > 1 else {}
        wrapped = hasattr(part, "set_requires_gradient_sync")
        plain = [] if wrapped else [p for p in part.parameters() if id(p) not in experts]
        if size > 1:
            all_reduce_gradients(plain, ranks.data.get_group(), 1 / size)
        if experts and not wrapped:
            all_reduce_gradients(list(experts.values()), ranks.experts["expert_replica"].get_group(), 1 / size)


def all_reduce_gradients(parameters: list[nn.Parameter], group: Any, factor: float = 1.0) -> None:
    """Sums gradients over a group in buckets of `BUCKET_BYTES`, times `factor`."""
    bucket: list[torch.Tensor] = []
    size = 0

    def flush() -> None:
        if not bucket:
            return
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        flat.mul_(factor)
        for g, piece in zip(bucket, flat.split([g.numel() for g in bucket])):
            g.copy_(piece.view_as(g))
        bucket.clear()

    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        settle(p)
        g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if bucket and (bucket[0].dtype != g.dtype or size + g.numel() * g.element_size() > BUCKET_BYTES):
            flush()
            size = 0
        bucket.append(g)
        size += g.numel() * g.element_size()
    flush()
