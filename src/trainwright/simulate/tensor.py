"""Tensor parallelism: columns then rows, with one exchange each way; the vocabulary-parallel embedding and cross-entropy.

    enter  (f)  forward: nothing           backward: all-reduce       in front of weights split by columns (q k v, gate up, head)
    leave  (g)  forward: all-reduce        backward: nothing          after weights split by rows (o, down)

Between the two, every rank works on its own heads or feed-forward columns and nothing is exchanged. Shoeybi et al. 2019 (Megatron-LM), section 3.
With sequence parallelism the exchanges are those of `sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import sequence
from .collectives import Array, bounds

if TYPE_CHECKING:
    from .run import Run

Grad = Callable[[Array], Array]


def enter(run: Run, x: Array) -> tuple[Array, Grad, Callable[[], Array]]:
    """(what every rank multiplies, backward, the same input again for the weight gradients)."""
    if run.layout.sequence_parallel:
        return sequence.enter(run, x)
    return x, lambda dx: run.tp.all_reduce(dx, "tp"), lambda: x


def leave(run: Run, partial: Array) -> tuple[Array, Grad]:
    """The sum of every rank's partial product, and backward."""
    if run.layout.sequence_parallel:
        return sequence.leave(run, partial)
    return run.tp.all_reduce(partial, "tp"), lambda dy: dy


def affine(run: Run, x: Array, weight: str, bias: str | None = None) -> Array:
    """x @ weight + bias with this rank's part of both."""
    y = run.operand(x) @ run.operand(run.weight(weight))
    return run.cast(y if bias is None else y + run.weight(bias))


def affine_backward(run: Run, x: Array, dy: Array, weight: str, bias: str | None = None) -> Array:
    """dx; the weight gradient is added now, or in the W action of a schedule that splits backward."""

    read = run.gradient_operand(dy)

    def weight_gradient() -> None:
        run.add(weight, run.operand(x).T @ read)
        if bias is not None:
            run.add(bias, dy.sum(0))

    run.later(weight_gradient)
    return run.cast_gradient(read @ run.operand(run.weight(weight)).T)


def vocabulary_range(run: Run) -> tuple[int, int]:
    return bounds(run.config.vocab, run.tp.size)[run.tp.me]


def embedding(run: Run, tokens: Array, positions: Array) -> tuple[Array, Grad]:
    """Rows of the vocabulary this rank has, zero for others' words, summed over the group. `tokens` (batch, length)."""
    lo, hi = vocabulary_range(run)
    ids = tokens.reshape(-1)
    here = (ids >= lo) & (ids < hi)
    x = np.where(here[:, None], run.weight("embedding")[np.where(here, ids - lo, 0)], 0)
    x, leave_backward = leave(run, x)
    where = np.tile(positions, len(tokens))
    mine = sequence.own_rows(run, len(ids))
    if run.config.positions == "learned":
        x = x + run.weight("positions")[where[mine]]

    def backward(dx: Array) -> Array:
        if run.config.positions == "learned":
            dpositions = np.zeros_like(run.weight("positions"))
            np.add.at(dpositions, where[mine], dx)
            run.later(lambda: run.add("positions", dpositions))
        full = leave_backward(dx)
        dtable = np.zeros_like(run.weight("embedding"))
        np.add.at(dtable, ids[here] - lo, full[here])
        run.later(lambda: run.add("embedding", dtable))
        return dx

    return x, backward


def cross_entropy(run: Run, logits: Array, targets: Array) -> tuple[float, Grad]:
    """Summed loss over the tokens with a target, logits never gathered: three all-reduces of one number per token (maximum, sum, target's logit).

    backward(scale) gives this rank's columns of dlogits = (softmax - onehot) x scale.
    """
    lo, hi = vocabulary_range(run)
    ids = targets.reshape(-1)
    valid = ids >= 0
    here = (ids >= lo) & (ids < hi)
    top = run.tp.all_reduce_max(logits.max(-1), "tp loss")
    exponent = np.exp(logits - top[:, None])
    total = run.tp.all_reduce(exponent.sum(-1), "tp loss")
    rows = np.arange(len(ids))
    column = np.where(here, ids - lo, 0)
    target = run.tp.all_reduce(np.where(here, logits[rows, column], 0), "tp loss")
    loss = np.where(valid, np.log(total) + top - target, 0).sum()
    softmax = exponent / total[:, None]

    def backward(scale: Array) -> Array:
        dlogits = softmax.copy()
        dlogits[rows[here], column[here]] -= 1
        return run.cast_gradient(dlogits * np.where(valid, scale, 0)[:, None])

    return float(loss), backward


def head(run: Run, x: Array, targets: Array) -> tuple[float, Grad]:
    """Logits by columns of the vocabulary and their loss; backward(scale) gives dx. A tied head is the embedding's rows as columns."""
    full, enter_backward, again = enter(run, x)

    def table() -> Array:
        return run.weight("embedding").T if run.config.tied else run.weight("head")

    loss, loss_backward = cross_entropy(run, run.cast(full @ table()), targets)
    del full

    def backward(scale: Array) -> Array:
        dlogits, source = loss_backward(scale), again()

        def weight_gradient() -> None:
            if run.config.tied:
                run.add("embedding", dlogits.T @ source)
            else:
                run.add("head", source.T @ dlogits)

        run.later(weight_gradient)
        return enter_backward(run.cast_gradient(dlogits @ table().T))

    return loss, backward
