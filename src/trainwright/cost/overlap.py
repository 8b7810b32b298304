"""How much of a collective shows: what a framework hides behind work, what that hiding costs, and what is left."""

from __future__ import annotations

import numpy as np

from ..frameworks.base import TimeRules
from ..spec.plan import Structure
from .message import Message
from .table import Column

IN_LAYER = ("tp", "cp", "ep")
DATA = ("dp", "dp_shard", "dp_replicate")


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
