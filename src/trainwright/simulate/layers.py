"""The arithmetic of one rank: forward and hand-written backward of every layer, without communication.

A forward returns (result, backward); backward takes the gradient of the result and returns those of the inputs. What a backward function's closure
holds is what the layer saves for it, and is counted as such (`saved_bytes`). Tokens are the first dim: (tokens, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .collectives import Array

EPS = 1e-5
Backward = Callable[[Array], Any]


def rms_norm(x: Array, scale: Callable[[], Array]) -> tuple[Array, Backward]:
    """y = x / sqrt(mean(x^2) + eps) * scale. Backward gives (dx, dscale). `scale` is asked for when it is used, so nothing holds on to it."""
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)

    def backward(dy: Array) -> tuple[Array, Array]:
        normed = x * inverse
        g = dy * scale()
        return inverse * (g - normed * (g * normed).mean(-1, keepdims=True)), (dy * normed).sum(0)

    return x * inverse * scale(), backward


def layer_norm(x: Array, scale: Callable[[], Array], shift: Callable[[], Array]) -> tuple[Array, Backward]:
    """y = (x - mean) / sqrt(var + eps) * scale + shift. Backward gives (dx, dscale, dshift)."""
    mean = x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPS)

    def backward(dy: Array) -> tuple[Array, Array, Array]:
        normed = (x - mean) * inverse
        g = dy * scale()
        dx = inverse * (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True))
        return dx, (dy * normed).sum(0), dy.sum(0)

    return (x - mean) * inverse * scale() + shift(), backward


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def swiglu(gate: Array, up: Array) -> tuple[Array, Backward]:
    """silu(gate) * up. Backward gives (dgate, dup)."""

    def backward(dy: Array) -> tuple[Array, Array]:
        s = sigmoid(gate)
        return dy * up * s * (1 + gate * (1 - s)), dy * gate * s

    return gate * sigmoid(gate) * up, backward


_GELU = np.sqrt(2 / np.pi)


def gelu(x: Array) -> tuple[Array, Backward]:
    """The tanh form of GELU (GPT-2's). Backward gives dx."""

    def backward(dy: Array) -> Array:
        t = np.tanh(_GELU * (x + 0.044715 * x**3))
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _GELU * (1 + 3 * 0.044715 * x * x))

    return 0.5 * x * (1 + np.tanh(_GELU * (x + 0.044715 * x**3))), backward


def rotary(x: Array, positions: Array, sign: int = 1) -> Array:
    """Rotary positions on (batch, length, heads, head_dim): pairs (i, i + d/2) turned by position / 10000^(2i/d). `sign` -1 turns back: the gradient."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[None, :, None, :].astype(x.dtype), sign * np.sin(angle)[None, :, None, :].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# --- attention, one block of keys at a time: (batch, kv heads, group x queries, d) against (batch, kv heads, keys, d) -------------------------------


def grouped(q: Array, kv_heads: int) -> Array:
    """(batch, queries, heads, d) -> (batch, kv heads, group x queries, d): queries that share a key-value head stand together."""
    b, s, h, d = q.shape
    return q.reshape(b, s, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)


def ungrouped(x: Array, queries: int) -> Array:
    """The inverse of `grouped`."""
    b, k, gs, d = x.shape
    return np.ascontiguousarray(x.reshape(b, k, gs // queries, queries, d).transpose(0, 3, 1, 2, 4).reshape(b, queries, -1, d))


def scores(q: Array, k: Array, q_positions: Array, k_positions: Array) -> Array:
    """Scaled causal scores; -inf where a key comes after the query."""
    found = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if q_positions.min(initial=0) < k_positions.max(initial=0):
        later = np.tile(q_positions[:, None] < k_positions[None, :], (q.shape[2] // len(q_positions), 1))
        np.copyto(found, -np.inf, where=later)
    return found


def merge(running: tuple[Array, Array, Array], s: Array, v: Array) -> tuple[Array, Array, Array]:
    """One more block of keys into a running (maximum, sum, weighted values): the online softmax of FlashAttention and ring attention."""
    top, total, values = running
    new_top = np.maximum(top, s.max(-1, keepdims=True))
    safe = np.where(np.isinf(new_top), 0, new_top)
    p, rescale = np.exp(s - safe), np.exp(top - safe)
    return new_top, total * rescale + p.sum(-1, keepdims=True), values * rescale + p @ v


def attention_gradients(p: Array, q: Array, k: Array, v: Array, dout: Array, delta: Array) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of one block from its probabilities; `delta` is sum(dout * out) per query."""
    ds = p * (dout @ v.transpose(0, 1, 3, 2) - delta) / np.sqrt(q.shape[-1])
    return ds @ k, ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ dout


# --- what is saved ------------------------------------------------------------------------------------------------------------------------------


def saved_arrays(held: Any, found: dict[int, Array] | None = None, seen: set[int] | None = None) -> dict[int, Array]:
    """The distinct arrays that a backward function keeps alive, through closures, tuples, lists and dicts; views count as what they view."""
    found = {} if found is None else found
    seen = set() if seen is None else seen
    if id(held) in seen:
        return found
    seen.add(id(held))
    if isinstance(held, np.ndarray):
        while isinstance(held.base, np.ndarray):
            held = held.base
        found[id(held)] = held
    elif isinstance(held, (tuple, list)):
        for item in held:
            saved_arrays(item, found, seen)
    elif isinstance(held, dict):
        for item in held.values():
            saved_arrays(item, found, seen)
    elif callable(held) and getattr(held, "__closure__", None):
        for cell in held.__closure__:
            try:
                saved_arrays(cell.cell_contents, found, seen)
            except ValueError:  # a name of the enclosing function that is not set (any more)
                continue
    return found


def saved_bytes(held: Any, ignore: dict[int, Array] | None = None) -> int:
    """Bytes of `saved_arrays`, integers (tokens) and those in `ignore` aside."""
    skip = ignore or {}
    return sum(a.nbytes for i, a in saved_arrays(held).items() if i not in skip and a.dtype.kind not in "iub")
