"""The chunked loss on the tape: head and cross-entropy over pieces of the sequence (torchtune's ``CEWithChunkedOutputLoss``).

The 16-bit logits of all pieces live until the forward pass returns, each piece's fp32 log-softmax until its own backward. A piece of several sequences is
no row of memory: the product copies it and saves the copy, and the labels are copied; a piece of one sequence is a view that keeps the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...spec.blocks import Op
from . import ops
from .machine import PART, Run, Storage, Tensor
from .sizes import Size, times

if TYPE_CHECKING:
    from .modules import Modules


class _Copy(Storage):
    """A copied piece, and the whole that it would be a view of."""

    __slots__ = ("whole",)
    whole: Storage | None


def split(r: Run, x: Tensor, sizes: list[Size]) -> list[Tensor]:
    """``x.chunk(...)``: views, whose gradients are joined by a copy."""
    if not x.needs_grad:
        return [Tensor(size, x.dtype, x.storage) for size in sizes]
    gradients: list[Tensor] = []
    elements, dtype = x.elements, x.dtype

    def join(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        out = r.new(elements, dtype, "joined gradients")
        gradients.clear()
        return [out]

    def keep(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        gradients.append(g)
        return [Tensor((), dtype, None) if len(gradients) == 1 else None]

    node = r.node("split", [x.node], [], join)
    return [Tensor(size, dtype, x.storage, r.node("piece", [node], [], keep)) for size in sizes]


def chunked_loss(step: Modules, op: Op, x: Tensor) -> Tensor:
    """Sum over the pieces of ``cross_entropy(head(piece).float(), labels)``; `x` goes when it returns."""
    s, r, chunks = step.symbols, step.run, step.setup.job.loss_chunks
    pieces = split(r, x, [s.piece(i, chunks, op.k) for i in range(chunks)])
    logits = [_project(step, op, piece, s.piece(i, chunks, op.width)) for i, piece in enumerate(pieces)]
    total: Tensor | None = None
    for i in range(chunks):
        labels = s.when(s.piece(i, chunks), "several sequences")
        with step.tape.leaving("loss"):
            loss = ops.cross_entropy(r, logits[i], s.one(1), labels)
        total = loss if total is None else ops.add(r, total, loss)
        del loss
    assert total is not None
    assert x.storage is not None
    pieces.clear()
    x.storage.become(s.when(x.storage.size, "one sequence"))
    return total


def _project(step: Modules, op: Op, piece: Tensor, out: Size) -> Tensor:
    weight = step.output_weight(op)
    if step.setup.types.autocast:  # the cast makes rows of it
        return step.product(piece, weight, out, None, "logits")
    size = times(step.symbols.when(piece.elements, "several sequences"), piece.dtype)
    copy = _Copy(step.tape, size, PART["activations"], "piece")
    copy.whole = piece.storage
    return step.product(Tensor(piece.elements, piece.dtype, copy, piece.node), weight, out, None, "logits")
