"""What one rank of a context-parallel group finds, held against dense attention in float64."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from trainwright.train import context
from trainwright.train.modules import Context

BATCH, HEADS, GROUPS, TOKENS, WIDTH = 2, 8, 4, 48, 16


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, window: int | None) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    back = torch.arange(TOKENS).unsqueeze(1) - torch.arange(TOKENS)
    allowed = ((back >= 0) & (back < (window or TOKENS)))[None, None]
    if documents is not None:
        allowed = allowed & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    return torch.softmax((q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(~allowed, float("-inf")), -1) @ v


def differences(kind: str, packed: bool) -> dict[str, float]:
    """Case and tensor -> the largest difference on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(1)
    q, k, v, g = (torch.randn(BATCH, n, TOKENS, WIDTH, generator=made, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS, HEADS))
    documents = (torch.rand(BATCH, TOKENS, generator=made) < 0.1).long().cumsum(1) if packed else None
    across = context.Across(dist.group.WORLD, rank, size, kind)
    index = context.index_of(rank, size, TOKENS, kind)
    found: dict[str, float] = {}
    for attention in ("flash", "eager"):
        for window in (None, 5):
            whole = [x.clone().requires_grad_() for x in (q, k, v)]
            out = dense(*whole, documents, window)
            out.backward(g)
            mine = [x[:, :, index].float().requires_grad_() for x in (q, k, v)]
            given = Context(index.unsqueeze(0))
            if documents is not None:
                given.everywhere = across.documents(documents[:, index])
            core = SimpleNamespace(kind=attention, op=SimpleNamespace(window=window))
            made_here = across.attend(*mine, given, core)
            made_here.backward(g[:, :, index].float())
            pairs = {"out": (made_here, out)} | {n: (m.grad, w.grad) for n, m, w in zip("qkv", mine, whole)}
            for name, (here, there) in pairs.items():
                assert here is not None
                assert there is not None
                found[f"{attention} window {window}: {name}"] = float((here.double() - there[:, :, index]).abs().max())
    return found
