"""What each action of a schedule costs, in seconds (or any one unit of time)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..errors import SpecError
from .actions import ActionTable, B, F, I, Placement, W

Cost: TypeAlias = float | Sequence[float] | Sequence[Sequence[float]] | np.ndarray
MAX_SECONDS = 1e15  # larger numbers lose the unit digit of a double


@dataclass(frozen=True)
class Costs:
    """Costs of one chunk and one microbatch: a number, one a stage [stages], or one a stage and microbatch [stages,
    microbatches].

    `backward` is the input gradient; an unsplit backward costs backward + weight. `recompute` is added to the (input)
    backward. A message takes `latency + message_bytes / bandwidth`; asynchronous it only delays the receiver,
    `blocking` it also keeps the sender busy. `overlap` is the cost of an overlapped forward and backward over the sum
    of both (never below the longer of the two). `reduce` and `gather` are a chunk's data-parallel gradient reduction
    and FSDP parameter gather, on a collective lane of their own; `regather`: the rank keeps two chunks' parameters at
    most, so a chunk is gathered (and its gradient reduced) again each time it comes up. `slowdown` [ranks] multiplies
    a rank's compute (a straggler). `activations` is what a microbatch leaves on a chunk until its weight gradient is
    done; None: 1 / chunks.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    weight: Cost = 0.0
    recompute: Cost = 0.0
    latency: float = 0.0
    message_bytes: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")
    blocking: bool = False
    overlap: float = 1.0
    reduce: Cost = 0.0
    gather: Cost = 0.0
    regather: bool = False
    slowdown: Sequence[float] | np.ndarray = field(default=())
    activations: Cost | None = None

    @property
    def message_seconds(self) -> float:
        return self.latency + (self.message_bytes / self.bandwidth_bytes_per_s if self.message_bytes else 0.0)

    def checked(self, place: Placement) -> Costs:
        """The same with every array at its full shape. Raises `SpecError` for a shape, sign or size that makes no
        sense.
        """
        latency, overlap = _single("p2p", self.latency, True), _single("overlap", self.overlap, False)
        message = _single("message_bytes", self.message_bytes, True)
        bandwidth = float("inf") if self.bandwidth_bytes_per_s == float("inf") else _single("bandwidth", self.bandwidth_bytes_per_s, False)
        slow = np.ones(place.ranks) if len(self.slowdown) == 0 else _numbers("slowdown", self.slowdown, allow_zero=False)
        if slow.shape != (place.ranks,):
            raise SpecError(f"{slow.size} factors for {place.ranks} ranks", "slowdown", f"{place.ranks} numbers")
        shaped = {name: spread(getattr(self, name), place, name) for name in ("forward", "backward", "weight", "recompute")}
        chunk = {name: spread(getattr(self, name), place, name, per_microbatch=False) for name in ("reduce", "gather")}
        for name in ("forward", "backward"):
            if not (shaped[name] > 0).any():
                raise SpecError("every action would cost nothing", name, "a number above 0")
        held = 1.0 / place.chunks if self.activations is None else self.activations
        activations = spread(held, place, "activations", per_microbatch=False)
        plain = {"latency": latency, "message_bytes": message, "bandwidth_bytes_per_s": bandwidth, "overlap": overlap}
        switches = {"blocking": bool(self.blocking), "regather": bool(self.regather)}
        return Costs(**shaped, **chunk, **plain, **switches, slowdown=slow, activations=activations)  # type: ignore[arg-type]


def _numbers(name: str, value: object, allow_zero: bool) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise SpecError(f"{str(value)[:60]!r} is not a number or a list of numbers", name) from None
    if not np.isfinite(array).all() or (np.abs(array) > MAX_SECONDS).any():
        raise SpecError("costs are finite numbers", name)
    if (array < 0).any() or (not allow_zero and (array == 0).any()):
        raise SpecError(
            f"{float(array.min()):g} is {'negative' if array.min() < 0 else 'zero'}",
            name,
            "0 or more" if allow_zero else "a number above 0",
        )
    return array


def _single(name: str, value: object, allow_zero: bool) -> float:
    array = _numbers(name, value, allow_zero)
    if array.ndim:
        raise SpecError(f"{array.size} numbers where one is expected", name)
    return float(array)


def spread(value: object, place: Placement, name: str, per_microbatch: bool = True) -> np.ndarray:
    """A number, [stages] or [stages, microbatches] as an array [stages, microbatches] (or [stages])."""
    array, shape = _numbers(name, value, allow_zero=True), (place.stages, place.microbatches)
    if array.ndim == 1 and array.shape == (place.stages,):
        array = array[:, None]
    elif array.ndim not in (0, 2) or (array.ndim == 2 and array.shape != shape):
        found, full = "x".join(map(str, array.shape)), "x".join(map(str, shape))
        raise SpecError(
            f"{found} numbers, expected 1, {shape[0]} (one a stage) or {full} (one a stage and microbatch)",
            name,
        )
    if not per_microbatch:
        return np.broadcast_to(array.mean(axis=1) if array.ndim == 2 else array, (place.stages,))
    return np.broadcast_to(array, shape)


def whole_share(value: object, place: Placement, name: str) -> np.ndarray:
    """A rank's whole share -> its chunks: a number or [ranks] is divided by the chunks a rank holds; [stages] and
    [stages, microbatches] are chunks already.
    """
    array = _numbers(name, value, allow_zero=True)
    if array.ndim == 0:
        return array / place.chunks
    if array.ndim == 1 and len(array) == place.ranks and place.chunks > 1:
        return array[place.rank_of_stage[0]] / place.chunks
    return array


def row_seconds(table: ActionTable, costs: Costs) -> np.ndarray:
    """Seconds of every row. `costs` must be `Costs.checked`."""
    forward, backward, weight = (
        np.asarray(costs.forward),
        np.asarray(costs.backward) + np.asarray(costs.recompute),
        np.asarray(costs.weight),
    )
    slow = np.asarray(costs.slowdown)
    uniform = all(not any(np.asarray(c).strides) for c in (costs.forward, costs.backward, costs.recompute, costs.weight))
    if uniform:  # one number each: four different rows at most
        f, b, w = (float(c[0, 0]) for c in (forward, backward, weight))
        by_kind = np.empty(4)
        by_kind[[F, I, W, B]] = f, b, w, b + w
        seconds = by_kind[table.kind]
    else:
        stacked = np.empty((4, *forward.shape))
        stacked[F], stacked[I], stacked[W], stacked[B] = forward, backward, weight, backward + weight
        seconds = stacked[table.kind, table.stage, table.microbatch]
    return seconds if (slow == 1).all() else seconds * slow[table.rank]
