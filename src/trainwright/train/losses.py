"""The loss as the plan says it is held: plain (logits whole), chunked, fused, or split over the vocabulary.

All are the sum of the cross-entropy over target tokens, in fp32. Chunked and fused take the hidden states and the output projection instead of logits, and
run inside the model's forward pass, where the projection's weight is whole under FSDP2.

* chunked: logits of one chunk of the sequence at a time, made again in backward, so that no more than one chunk's ever exist.
* fused: PyTorch's ``linear_cross_entropy`` with its own chunks, which makes the gradients in forward and keeps no logits.
* vocab-parallel: the plain loss inside ``loss_parallel()``, whose logits stay split over the tp axis.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..errors import SpecError
from ..resolve import Run
from .data.samples import IGNORED

HeadLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]  # output projection, hidden states, labels -> sum


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over target tokens, in fp32: (batch, tokens, vocabulary) and (batch, tokens). A plain tensor, of split logits too."""
    found = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return found.to_local() if isinstance(found, DTensor) else found


def of_plan(run: Run) -> HeadLoss | None:
    """What the last part of the model computes in place of logits; None: it gives logits (plain, vocab-parallel)."""
    plan, job = run.plan, run.job
    if job.loss == "fused":
        return fused
    if job.loss != "chunked":
        return None
    parts = plan.tp if plan.structure.sequence_parallel else 1
    return lambda head, x, labels: chunked(head, x, labels, job.loss_chunks, parts)


def check(run: Run) -> None:
    """Raises `SpecError` for a loss that the layout, or this PyTorch, cannot run."""
    if run.job.loss == "fused" and not hasattr(nn, "LinearCrossEntropyOptions"):
        raise SpecError(f"PyTorch {torch.__version__} has no fused projection and loss", "training.loss", ["chunked"])
    if run.job.loss == "fused" and run.plan.tp > 1:
        raise SpecError(
            "the fused loss needs the whole output projection, which tensor parallelism splits",
            "training.loss",
            ["vocab-parallel", "chunked"],
        )


def chunked(head: nn.Module, x: torch.Tensor, labels: torch.Tensor, chunks: int, parts: int = 1) -> torch.Tensor:
    """`x` (batch, tokens / parts, width), `labels` (batch, tokens): with `parts` > 1 ranks hold parts of the sequence, which `head` gathers in their order."""

    def piece(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(head(x), labels)

    total = torch.zeros((), device=x.device)
    by_part = labels.unflatten(1, (parts, -1)).chunk(chunks, dim=2)
    for some, wanted in zip(x.chunk(chunks, dim=1), by_part):
        total = total + checkpoint(piece, some, wanted.flatten(1, 2), use_reentrant=False, preserve_rng_state=False)
    return total


def fused(head: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """PyTorch's fused projection and loss, (batch, tokens, width) and (batch, tokens)."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert not isinstance(weight, DTensor)
    if torch.is_autocast_enabled(x.device.type):
        low = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    options = nn.LinearCrossEntropyOptions()
    flat = x.flatten(0, 1)
    found = F.linear_cross_entropy(flat, weight, labels.flatten(), linear_bias=bias, reduction="sum", ignore_index=IGNORED, options=options)
    return found.float()
