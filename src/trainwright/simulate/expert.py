"""Expert parallelism: tokens go to where their experts live and come back (two all-to-alls forward, two backward).

The router picks `top_k` experts per token and weighs them by a softmax over the chosen logits (Mixtral). With a capacity factor c, an expert takes
ceil(c x tokens x top_k / experts) rows of each rank's microbatch, first come first served; the rest are dropped: the residual carries
them (GShard, Switch). Experts may be spread unevenly; each rank's all-to-all sends as many rows as the router asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import layers, tensor
from .collectives import Array, bounds

if TYPE_CHECKING:
    from .run import Micro, Run

Grad = Callable[[Array], Array]


@dataclass(frozen=True)
class Routing:
    """What one rank's router did with one microbatch in one block."""

    asked: tuple[int, ...]  # rows per expert that the router asked for
    kept: tuple[int, ...]  # rows per expert after the capacity
    capacity: int  # 0: none

    @property
    def dropped(self) -> int:
        return sum(self.asked) - sum(self.kept)


def within_capacity(experts: Array, groups: Array, count: int, top_k: int, factor: float | None) -> tuple[Array, int]:
    """(which (token, slot) rows fit, the capacity). `experts` (tokens, top_k); `groups` (tokens,): each group has a capacity of its own."""
    keep = np.ones(experts.shape, bool)
    largest = 0
    if factor is None:
        return keep, 0
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        capacity = math.ceil(factor * len(rows) * top_k / count)
        chosen = experts[rows].reshape(-1)
        order = np.argsort(chosen, kind="stable")
        place = np.empty(len(chosen), int)
        starts = np.searchsorted(chosen[order], np.arange(count))
        place[order] = np.arange(len(chosen)) - starts[chosen[order]]
        keep[rows] = (place < capacity).reshape(-1, top_k)
        largest = max(largest, capacity)
    return keep, largest


def _feed_forward(run: Run, prefix: str, expert: int, rows: Array) -> tuple[Array, Grad]:
    """One local expert on its rows."""
    at = prefix + "experts."
    if run.config.gated:
        hidden, act_backward = layers.swiglu(rows @ run.weight(at + "gate")[expert], rows @ run.weight(at + "up")[expert])
    else:
        hidden, act_backward = layers.gelu(rows @ run.weight(at + "up")[expert])

    def backward(dy: Array) -> Array:
        dhidden = dy @ run.weight(at + "down")[expert].T
        grads = act_backward(dhidden)
        grads = dict(zip(("gate", "up"), grads)) if run.config.gated else {"up": grads}

        def weight_gradient() -> None:
            run.add_part(at + "down", expert, hidden.T @ dy)
            for name, grad in grads.items():
                run.add_part(at + name, expert, rows.T @ grad)

        run.later(weight_gradient)
        return sum((grad @ run.weight(at + name)[expert].T for name, grad in grads.items()), np.zeros_like(rows))

    return hidden @ run.weight(at + "down")[expert], backward


def _local_experts(run: Run, prefix: str, rows: Array, owner: Array) -> tuple[Array, Grad]:
    """Every local expert on the rows that came for it; `owner` says which."""
    count = run.weight(prefix + "experts.down").shape[0]
    out = np.zeros_like(rows)
    parts: list[tuple[Array, Grad]] = []
    for expert in range(count):
        mine = np.flatnonzero(owner == expert)
        out[mine], backward_one = _feed_forward(run, prefix, expert, rows[mine])
        parts.append((mine, backward_one))

    def backward(dout: Array) -> Array:
        drows = np.zeros_like(dout)
        for mine, backward_one in parts:
            drows[mine] = backward_one(dout[mine])
        return drows

    return out, backward


def _exchange(run: Run, rows: Array, sizes: list[int]) -> tuple[Array, list[int]]:
    """All-to-all of consecutive rows; returns what came, and how many rows from each."""
    ends = np.cumsum([0, *sizes])
    got = run.ep.all_to_all([rows[a:b] for a, b in itertools.pairwise(ends)], "ep")
    return np.concatenate(got), [len(g) for g in got]


def _route(run: Run, unit: int, full: Array, micro: Micro) -> tuple[Array, Array, Array]:
    """(experts (tokens, k), gates (tokens, k), keep): the router's choice."""
    config = run.config
    logits = full @ run.weight(f"{unit}.router")
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, : config.top_k]
    chosen = np.take_along_axis(logits, experts, -1)
    gates = np.exp(chosen - chosen.max(-1, keepdims=True))
    gates /= gates.sum(-1, keepdims=True)
    keep, capacity = within_capacity(experts, micro.groups, config.experts, config.top_k, config.capacity_factor)
    asked = np.bincount(experts.reshape(-1), minlength=config.experts)
    kept = np.bincount(experts[keep], minlength=config.experts)
    run.routing[run.number, unit, micro.number] = Routing(tuple(asked.tolist()), tuple(kept.tolist()), capacity)
    return experts, gates, keep


def mixture(run: Run, unit: int, x: Array, micro: Micro) -> tuple[Array, Grad]:
    """The mixture-of-experts feed-forward of one block."""
    prefix, config = f"{unit}.", run.config
    full, enter_backward, again = tensor.enter(run, x)
    experts, gates, keep = _route(run, unit, full, micro)
    token, slot = np.nonzero(keep)
    order = np.argsort(experts[token, slot], kind="stable")
    token, slot = token[order], slot[order]
    per_expert = np.bincount(experts[token, slot], minlength=config.experts)
    places = bounds(config.experts, run.ep.size)
    sizes = [int(per_expert[lo:hi].sum()) for lo, hi in places]
    counts = run.ep.all_to_all([per_expert[lo:hi] for lo, hi in places], "ep counts")
    rows, came = _exchange(run, full[token], sizes)
    owner = np.concatenate([np.repeat(np.arange(len(c)), c) for c in counts])
    out, experts_backward = _local_experts(run, prefix, rows, owner)
    returned, _ = _exchange(run, out, came)
    partial = np.zeros_like(full)
    np.add.at(partial, token, run.cast(gates[token, slot][:, None] * returned))
    y, leave_backward = tensor.leave(run, partial)
    tokens = len(full)
    del full, rows, out, partial

    def backward(dy: Array) -> Array:
        dpartial = leave_backward(dy)[token]
        dgates = np.zeros_like(gates)
        dgates[token, slot] = (dpartial * returned).sum(-1)
        dout, _ = _exchange(run, gates[token, slot][:, None] * dpartial, sizes)
        drows, _ = _exchange(run, experts_backward(dout), came)
        dfull = np.zeros((tokens, config.hidden), dy.dtype)
        np.add.at(dfull, token, drows)
        dlogits = np.zeros((tokens, config.experts), dy.dtype)
        np.put_along_axis(dlogits, experts, gates * (dgates - (gates * dgates).sum(-1, keepdims=True)), -1)
        source = again()
        run.later(lambda: run.add(prefix + "router", source.T @ dlogits))
        return enter_backward(dfull + dlogits @ run.weight(prefix + "router").T)

    return y, backward
