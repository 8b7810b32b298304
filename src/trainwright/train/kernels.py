"""Attention on one rank by the kernel that a plan names, on whatever the machine has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .fused import fits

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa-math": SDPBackend.MATH}


def documents_mask(documents: torch.Tensor) -> torch.Tensor:
    """(batch, 1, queries, keys), true where a token may look: its own document, not later."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(same.shape[1:], dtype=torch.bool, device=documents.device).tril()
    return (same & causal).unsqueeze(1)


def window_mask(tokens: int, window: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(tokens, device=device)
    back = at.unsqueeze(1) - at.unsqueeze(0)
    return ((back >= 0) & (back < window))[None, None]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, mask: torch.Tensor | None = None, window: int | None = None
) -> torch.Tensor:
    """Causal attention, (batch, heads, tokens, head_dim) of each, fewer key-value heads allowed; `mask` (batch, 1, queries, keys) replaces causality."""
    groups = q.shape[1] // k.shape[1]
    near = window is not None and window < q.shape[2]
    # The flash kernel reads each key-value head for all of its queries; others, and masks, want one for each.
    shared = groups > 1 and kind == "flash" and mask is None and not near and fits(q, v)
    if groups > 1 and not shared:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if window is not None and near:
        seen = window_mask(q.shape[2], window, q.device)
        mask = seen if mask is None else mask & seen
    if kind == "eager":
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)
    if mask is not None:  # no flash kernel takes a mask; the efficient one does
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel([BACKENDS[kind], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
