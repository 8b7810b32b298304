"""Context parallelism: one sequence over several ranks, keys and values traveling round the ring.

Each rank keeps its queries and sends the block of keys and values it holds to the next rank, n - 1 times; an online softmax joins the blocks. In backward
the blocks go round again (n - 1 times) with their gradients (n times, so that they end at home). Liu et al. 2023 (ring attention).

Two other ways: `allgather` of all keys and values (Llama 3), and `ulysses`, all-to-alls between tokens and heads.

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


Attend = Callable[[Array], tuple[Array, Array, Array]]


def attention(run: Run, q: Array, k: Array, v: Array) -> tuple[Array, Attend]:
    """Causal attention of (batch, length, heads, d) queries over every rank's keys and values (batch, length, kv heads, d).

    Saved: q, k, v, the result and one number per query (as FlashAttention), or the probabilities themselves where `flash` is off and the recompute
    mode does not drop them.
    """
    kinds = {"ring": ring, "allgather": allgather, "ulysses": ulysses}
    return kinds[run.layout.cp_kind if run.cp.size > 1 else "ring"](run, q, k, v)


def local(run: Run, q: Array, k: Array, v: Array, q_at: Array, k_at: Array) -> tuple[Array, Array]:
    """(result, log-sum) of queries over keys that are all here. Positions need not be in order."""
    queries = layers.grouped(q, k.shape[2])
    top, total, values = layers.merge(_start(queries), layers.scores(queries, k.transpose(0, 2, 1, 3), q_at, k_at), v.transpose(0, 2, 1, 3))
    return run.cast(layers.ungrouped(values / total, q.shape[1])), top + np.log(total)


def local_backward(
    q: Array, k: Array, v: Array, out: Array, log_sum: Array, dout: Array, q_at: Array, k_at: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of `local`."""
    kv_heads, length = k.shape[2], q.shape[1]
    queries, gradient = layers.grouped(q, kv_heads), layers.grouped(dout, kv_heads)
    delta = (gradient * layers.grouped(out, kv_heads)).sum(-1, keepdims=True)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    p = np.exp(layers.scores(queries, keys, q_at, k_at) - log_sum)
    dq, dk, dv = layers.attention_gradients(p, queries, keys, values, gradient, delta)
    return layers.ungrouped(dq, length), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _start(queries: Array) -> tuple[Array, Array, Array]:
    """Nothing seen yet: maximum -inf, sum 0, values 0."""
    one = (*queries.shape[:3], 1)
    return np.full(one, -np.inf, queries.dtype), np.zeros(one, queries.dtype), np.zeros_like(queries)


def ring(run: Run, q: Array, k: Array, v: Array) -> tuple[Array, Attend]:
    """Keys and values go round the ring; with one rank, plain attention."""
    n, me, length, kv_heads = run.cp.size, run.cp.me, q.shape[1], k.shape[2]
    at = positions_of(run.length, n, run.layout.cp_balance)
    queries = layers.grouped(q, kv_heads)
    running = _start(queries)
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


def allgather(run: Run, q: Array, k: Array, v: Array) -> tuple[Array, Attend]:
    """Every rank gathers all keys and values (again in backward) and hands their gradients back by a reduce-scatter. Llama 3, section 3.3.2."""
    at = positions_of(run.length, run.cp.size, run.layout.cp_balance)
    mine, all_at = at[run.cp.me], np.concatenate(at)

    def gathered() -> tuple[Array, Array]:
        pieces = run.cp.all_gather(np.stack([k, v]), "cp")
        return tuple(np.concatenate(pieces, axis=2))

    out, log_sum = local(run, q, *gathered(), mine, all_at)

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = local_backward(q, *gathered(), out, log_sum, dout, mine, all_at)
        ends = np.cumsum([len(a) for a in at])[:-1]
        dk, dv = run.cp.reduce_scatter(np.split(np.stack([dk, dv]), ends, axis=2), "cp")
        return dq, dk, dv

    return out, backward


def ulysses(run: Run, q: Array, k: Array, v: Array) -> tuple[Array, Attend]:
    """All-to-alls turn a part of the tokens with all heads into all tokens with a part of the heads, and back. Jacobs et al. 2023 (DeepSpeed-Ulysses)."""
    n, kv_heads = run.cp.size, k.shape[2]
    at = positions_of(run.length, n, run.layout.cp_balance)
    order, ends = np.concatenate(at), np.cumsum([len(a) for a in at])[:-1]
    group = q.shape[2] // kv_heads
    heads = bounds(kv_heads, n)

    def to_heads(x: Array, per: int) -> Array:
        return np.concatenate(run.cp.all_to_all([x[:, :, lo * per : hi * per] for lo, hi in heads], "cp"), axis=1)

    def to_tokens(x: Array) -> Array:
        return np.concatenate(run.cp.all_to_all(np.split(x, ends, axis=1), "cp"), axis=2)

    everything = to_heads(q, group), to_heads(k, 1), to_heads(v, 1)
    whole, log_sum = local(run, *everything, order, order)

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = local_backward(*everything, whole, log_sum, to_heads(dout, group), order, order)
        return to_tokens(dq), to_tokens(dk), to_tokens(dv)

    return to_tokens(whole), backward


def _probabilities(queries: Array, k: Array, positions: Array, log_sum: Array) -> Array:
    return np.exp(layers.scores(queries, k.transpose(0, 2, 1, 3), positions, positions) - log_sum)
