"""What parallelism computes against what one device computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .collectives import Array
from .data import capacity_groups
from .fsdp import Optimizer
from .layout import Layout
from .model import Batch, TinyConfig, initial, random_batch
from .run import Result, train


@dataclass(frozen=True)
class Difference:
    """Largest absolute and relative differences; relative is max |a - b| / max |b| of a tensor, the largest over tensors.

    `gradient_norm` is ||a - b|| / ||b|| over the whole gradient: how far another way of averaging is off.
    """

    loss: float
    gradients: float
    weights: float
    absolute: float
    worst: str
    gradient_norm: float

    @property
    def relative(self) -> float:
        """The largest of the three."""
        return max(self.loss, self.gradients, self.weights)


@dataclass(frozen=True)
class Comparison:
    """A distributed run beside the one-device run on the same batches."""

    config: TinyConfig
    layout: Layout
    batches: tuple[Batch, ...]
    distributed: Result
    single: Result
    difference: Difference


def relative(got: Mapping[str, Array], want: Mapping[str, Array]) -> tuple[float, str]:
    """(the largest relative difference, the tensor it is in): max |a - b| / max |b| of each tensor.

    A tensor that is zero but for rounding (the query's gradient in sequences of one token) is measured against the largest tensor.
    """
    size = {n: float(np.abs(w).max()) for n, w in want.items()}
    largest = max(size.values())
    found = {n: float(np.abs(got[n] - w).max() / (size[n] if size[n] > 1e-13 * largest else max(largest, 1e-300))) for n, w in want.items()}
    worst = max(found, key=lambda n: found[n])
    return found[worst], worst


def difference(got: Result, want: Result) -> Difference:
    loss = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got.losses, want.losses))
    gradients, worst_gradient = relative(got.gradients, want.gradients)
    weights, worst_weight = relative(got.weights, want.weights)
    absolute = max(float(np.abs(got.weights[n] - w).max()) for n, w in want.weights.items())
    off = sum(float(((got.gradients[n] - g) ** 2).sum()) for n, g in want.gradients.items())
    norm = sum(float((g**2).sum()) for g in want.gradients.values())
    worst = worst_gradient if gradients > weights else worst_weight
    return Difference(loss, gradients, weights, absolute, worst, (off / max(norm, 1e-300)) ** 0.5)


def make_batches(config: TinyConfig, batch: int, length: int, steps: int, seed: int = 0, padded: bool = False) -> tuple[Batch, ...]:
    return tuple(random_batch(config, batch, length, seed + step, padded) for step in range(steps))


def compare(
    config: TinyConfig,
    layout: Layout,
    *,
    batch: int = 8,
    length: int = 16,
    steps: int = 5,
    seed: int = 0,
    padded: bool = False,
    optimizer: Optimizer | None = None,
    batches: Sequence[Batch] = (),
    dtype: Any = np.float64,
    single: Result | None = None,
) -> Comparison:
    """Train `steps` steps under `layout` and on one device, from the same weights on the same tokens.

    One device drops the tokens that the ranks' capacities drop (capacity is counted per rank and microbatch there). Raises `SpecError` on a layout
    that does not fit. `single`: a one-device run to compare with, where it is known already.
    """
    chosen = tuple(batches) or make_batches(config, batch, length, steps, seed, padded)
    weights = initial(config, seed, dtype)
    distributed = train(config, layout, chosen, weights, optimizer=optimizer)
    groups = capacity_groups(layout, *chosen[0].shape) if config.capacity_factor else None
    single = single or train(config, Layout(), chosen, weights, optimizer=optimizer, groups=groups)
    return Comparison(config, layout, chosen, distributed, single, difference(distributed, single))
