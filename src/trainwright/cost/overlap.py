"""How much of a collective shows: what a framework hides behind work, what that hiding costs, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..frameworks.base import TimeRules
from ..spec.plan import Structure
from .message import Message
from .table import Column

IN_LAYER = ("tp", "cp", "ep")
DATA = ("dp", "dp_shard", "dp_replicate")


@dataclass(frozen=True)
class Traffic:
    """One message kind with its price: seconds a step of one rank, and the part of it that nothing hides."""

    message: Message
    seconds: Column
    exposed: Column


def behind(seconds: Column, window: Column, residual: float) -> Column:
    """Exposed seconds of traffic that runs beside `window` seconds of work: what outlasts the window, and `residual` of what fits in it.

    The residual holds the first and last bucket, which have nothing to hide behind, and the slowdown of kernels that share SMs and memory with a
    collective. It never exceeds the traffic itself.
    """
    hidden = np.minimum(seconds, window)
    return seconds - hidden * (1.0 - residual)


def in_layer(
    message: Message, seconds: Column, window: Column, structure: Structure, rules: TimeRules, year: float, slowdown: float
) -> Column:
    """Exposed seconds of traffic inside layers. `window`: kernel seconds of a step that a "layer" overlap may hide behind.

    Tensor-parallel traffic hides by `rules.hides_tp` where the collective is cut up and run inside the product (async_tp), and behind the weight
    gradient's product (half of the backward window) where the framework runs both at once.
    """
    if message.axis == "tp" and structure.async_tp:
        return seconds * (1.0 - rules.hides_tp) if message.overlaps else seconds
    if message.axis == "tp":
        hides = message.overlaps == "product" and year >= rules.hides_input_gradient_since
        return behind(seconds, 0.5 * window, slowdown) if hides else seconds
    if message.overlaps:
        return behind(seconds, window, slowdown)
    return seconds * (1.0 - rules.hides_ep) if message.axis == "ep" and year >= rules.hides_ep_since else seconds


def by_axis(traffic: Sequence[Traffic], axes: Sequence[str], phases: Sequence[str], like: Column) -> Column:
    """Exposed seconds a step of the messages of these axes and phases."""
    return sum((t.exposed for t in traffic if t.message.axis in axes and t.message.phase in phases), np.zeros_like(like))
