"""Context parallelism: one sequence over several ranks, keys and values travelling round the ring.

Each rank keeps its queries and sends the block of keys and values it holds to the next rank, n - 1 times; an online softmax joins the blocks. In backward
the blocks go round again (n - 1 times) with their gradients (n times, so that they end at home). Liu et al. 2023 (ring attention).

Causal attention makes contiguous pieces unequal work (the last rank has all the keys to look at); the balanced cut gives rank c the pieces c and 2n-1-c of
2n (zigzag, as Llama 3 and ring-flash-attention do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import layers
from .collectives import Array, bounds

if TYPE_CHECKING:
    from .run import Run


def positions_of(length: int, ranks: int, balanced: bool = True) -> list[Array]:
    """Which token positions each rank has."""
    if not balanced or ranks == 1:
        return [np.arange(lo, hi) for lo, hi in bounds(length, ranks)]
    pieces = [np.arange(lo, hi) for lo, hi in bounds(length, 2 * ranks)]
    return [np.concatenate([pieces[c], pieces[2 * ranks - 1 - c]]) for c in range(ranks)]


def causal_pairs(length: int, ranks: int, balanced: bool) -> list[list[int]]:
    """[step][rank]: query-key pairs that rank computes at that step of the ring; a step takes as long as its largest."""
    at = positions_of(length, ranks, balanced)
    counts = [[int((q[:, None] >= k[None, :]).sum()) for k in at] for q in at]
    return [[counts[r][(r - step) % ranks] for r in range(ranks)] for step in range(ranks)]


def attention(run: Run, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Causal attention of (batch, length, heads, d) queries over every rank's keys and values (batch, length, kv heads, d).

    Saved: q, k, v, the result and one number per query (as FlashAttention), or the probabilities themselves where `flash` is off and the recompute
    mode does not drop them.
    """
    n, me, length, kv_heads = run.cp.size, run.cp.me, q.shape[1], k.shape[2]
    at = positions_of(run.length, n, run.layout.cp_balance)
    queries = layers.grouped(q, kv_heads)
    running = (
        np.full((*queries.shape[:3], 1), -np.inf, q.dtype),
        np.zeros((*queries.shape[:3], 1), q.dtype),
        np.zeros_like(queries),
    )
    block = [k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)]
    for step in range(n):
        source = (me - step) % n
        running = layers.merge(running, layers.scores(queries, block[0], at[me], at[source]), block[1])
        if step < n - 1:
            block = run.cp.shift(block, "cp")
    top, total, values = running
    out = run.cast(layers.ungrouped(values / total, length))
    log_sum = top + np.log(total)
    kept = _probabilities(layers.grouped(q, kv_heads), k, at[me], log_sum) if run.keeps_probabilities else None

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        queries, gradient = layers.grouped(q, kv_heads), layers.grouped(dout, kv_heads)
        delta = (gradient * layers.grouped(out, kv_heads)).sum(-1, keepdims=True)
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        dq, dk, dv = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
        for step in range(n):
            source = (me - step) % n
            p = kept if kept is not None else np.exp(layers.scores(queries, keys, at[me], at[source]) - log_sum)
            more = layers.attention_gradients(p, queries, keys, values, gradient, delta)
            dq, dk, dv = dq + more[0], dk + more[1], dv + more[2]
            if n > 1:
                dk, dv = run.cp.shift([dk, dv], "cp")
            if step < n - 1:
                keys, values = run.cp.shift([keys, values], "cp")
        return layers.ungrouped(dq, length), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)

    del queries, running, block, values, top, total
    return out, backward


def _probabilities(queries: Array, k: Array, positions: Array, log_sum: Array) -> Array:
    return np.exp(layers.scores(queries, k.transpose(0, 2, 1, 3), positions, positions) - log_sum)
