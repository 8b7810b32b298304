"""The flash kernels one block at a time, with their log-sum-exp, which PyTorch's functional attention keeps to itself: what ring attention merges."""

from __future__ import annotations

from typing import Any

import torch

aten: Any = torch.ops.aten


def fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this machine's flash kernel takes such queries (batch, heads, tokens, head_dim) and values."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16)
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // x.shape[1]
    return x.contiguous() if groups == 1 else x.repeat_interleave(groups, 1)


def _fold(g: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    groups = g.shape[1] // like.shape[1]
    return g.float() if groups == 1 else g.float().unflatten(1, (like.shape[1], groups)).sum(2)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, log-sum-exp with a last dim of 1), both fp32; fewer key-value heads allowed."""
    q, keys, values = q.contiguous(), _heads(k, q), _heads(v, q)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu if q.device.type == "cpu" else aten._scaled_dot_product_flash_attention
    out, total = kernel(q, keys, values, 0.0, causal)[:2]
    return out.float(), total.float().unsqueeze(-1)


def backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block's share of the gradients of q, k, v in fp32, given the *whole* row's result and log-sum-exp."""
    keys, values = _heads(k, q), _heads(v, q)
    g, q, out, total = g.contiguous(), q.contiguous(), out.contiguous(), total.squeeze(-1).contiguous()
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, keys, values, out, total, 0.0, causal)
    else:
        # Without dropout the kernel reads no random state; without cumulative lengths the batch is dense.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            g, q, keys, values, out, total, None, None, q.shape[2], keys.shape[2], 0.0, causal, state, torch.empty(0, device=q.device)
        )
    return found[0].float(), _fold(found[1], k), _fold(found[2], v)
