"""What gloo's collectives cost: the algorithms that PyTorch's gloo backend runs, over any link with a rate and a one-way latency.

Two transfers are in flight on each rank. A receiver announces its buffer before the sender sends (transport/tcp/pair.cc: NOTIFY_RECV_READY), so that a
round costs two latencies L and the transfer t of one piece. `count` pieces one after another, two at a time:

    count t + 2 L + (count / 2 - 1) max(L, 2 L - t)

The last factor is the wait between pairs of pieces: the announcement of the next one queues behind the piece that is being sent, and hides what it can.

    all_reduce       ring, 2 (n-1)/n S: n x k segments of at most 1 MiB, k at least 2, gathered and scattered in (n-1) k pieces each (gloo/allreduce.cc)
    all_gather       ring, (n-1)/n S in 2 (n-1) pieces of half a share (gloo/allgather.cc)
    reduce_scatter   PyTorch runs an all-reduce and keeps a part (ProcessGroupGloo.cpp): twice a ring's bytes
    broadcast        binomial tree of whole messages (gloo/broadcast.cc)
    all_to_all       every pair at once, (n-1)/n S out of each rank (gloo/alltoall.cc)
    send_recv        the announcement and the message

Inside one host the same transfers run over the loopback device; `trainwright calibrate` measures those, and then the curves are taken (`measured`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..spec.cluster import CollectiveCurve
from .table import Column

if TYPE_CHECKING:
    from .collectives import _Group

SEGMENT_BYTES = 2.0**20  # gloo/allreduce.h: kMaxSegmentSize


def _rate(c: _Group) -> Column:
    """Bytes/s of the slowest hop; a node's ring leaves it through all of its members' share of the network."""
    return np.where(c.many, c.domain_nics(c.net.ring), c.link_rate * c.link.ring)


def _latency(c: _Group) -> Column:
    return np.where(c.many, c.net.hop_s, c.link.hop_s)


def _pieces(c: _Group, count: Column, piece: Column) -> Column:
    """`count` transfers of `piece` bytes, two in flight."""
    one, wait = piece / _rate(c), _latency(c)
    return count * one + 2 * wait + np.maximum(count / 2 - 1, 0) * np.maximum(wait, 2 * wait - one)


def _all_reduce(c: _Group) -> Column:
    least = np.maximum(np.ceil(c.size / SEGMENT_BYTES), 2 * c.n)
    segments = np.ceil(least / c.n)  # of each rank
    return c.link.start_s + 2 * _pieces(c, (c.n - 1) * segments, c.size / (c.n * segments))


def _all_gather(c: _Group) -> Column:
    return c.link.start_s + _pieces(c, 2 * (c.n - 1), c.size / (2 * c.n))


def _broadcast(c: _Group) -> Column:
    return c.link.start_s + np.ceil(np.log2(np.maximum(c.n, 2))) * (2 * _latency(c) + c.size / _rate(c))


def _all_to_all(c: _Group) -> Column:
    inside = (c.g - 1) / c.n * c.size / (c.link_rate * c.link.exchange)
    between = np.where(c.many, (c.n - c.g) / c.n * c.size / (c.nic_rate * c.net.exchange), 0.0)
    return c.link.start_s + 2 * _latency(c) + np.maximum(inside, between)


def _pair(c: _Group) -> Column:
    rate = np.where(c.many, c.nic_rate * c.net.exchange, c.link_rate * c.link.pair)
    return c.link.start_s + 2 * _latency(c) + c.size / rate


GLOO: dict[str, dict[str, Callable[[_Group], Column]]] = {
    "all_reduce": {"ring": _all_reduce},
    "all_gather": {"ring": _all_gather},
    "reduce_scatter": {"ring": _all_reduce},
    "broadcast": {"tree": _broadcast},
    "all_to_all": {"pairwise": _all_to_all},
    "send_recv": {"pairwise": _pair},
}


def measured(curves: tuple[CollectiveCurve, ...], kind: str, group: _Group, law: Column) -> Column:
    """Seconds from the measured curves of a kind, for groups inside a node; `law` where there are none.

    Between two sizes the time is a straight line, below the first it is the first, beyond the last it grows at the last slope. A group of a size that was
    not measured takes the nearest one that was, times the ratio of what the algorithm sends.
    """
    known = sorted((c for c in curves if c.kind == kind), key=lambda c: c.ranks)
    if not known:
        return law
    sizes = np.array([c.ranks for c in known])
    out = np.array(law, dtype=np.float64)
    for n in np.unique(group.n):
        curve = known[int(np.abs(sizes - n).argmin())]
        rows = (group.n == n) & ~group.many
        out[rows] = _on(curve, group.size[rows]) * (_sent(kind, n) / _sent(kind, curve.ranks))
    return out


def _sent(kind: str, n: float) -> float:
    """Of a message, what one rank sends."""
    return 1.0 if kind in ("broadcast", "send_recv") else (n - 1) / n


def _on(curve: CollectiveCurve, size: Column) -> Column:
    x, y = np.array(curve.bytes), np.array(curve.seconds)
    inside = np.interp(size, x, y)
    if len(x) < 2:
        return inside * np.maximum(size / x[0], 1.0)
    slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0)
    return inside + np.maximum(size - x[-1], 0.0) * slope
