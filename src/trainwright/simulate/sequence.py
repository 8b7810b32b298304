"""Sequence parallelism: outside the tensor-parallel products each rank keeps only its share of the tokens.

An all-reduce is a reduce-scatter and an all-gather; here the two stand apart, so norms, residuals and saved inputs are 1/tp per rank while the bytes stay
the same. The input of a product is saved as the share and gathered again in backward: one more all-gather. Korthikanti et al. 2022, section 4.2.

    enter   forward: all-gather        backward: reduce-scatter (and all-gather of the input again)
    leave   forward: reduce-scatter    backward: all-gather
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .collectives import Array, bounds

if TYPE_CHECKING:
    from .run import Run

Grad = Callable[[Array], Array]


def own_rows(run: Run, tokens: int) -> slice:
    """This rank's tokens among the microbatch's: all of them without sequence parallelism."""
    if not run.layout.sequence_parallel:
        return slice(0, tokens)
    return slice(*bounds(tokens, run.tp.size)[run.tp.me])


def _gather(run: Run, x: Array) -> Array:
    return np.concatenate(run.tp.all_gather(x, "tp"))


def _scatter(run: Run, full: Array) -> Array:
    return run.tp.reduce_scatter([full[lo:hi] for lo, hi in bounds(len(full), run.tp.size)], "tp")


def enter(run: Run, x: Array) -> tuple[Array, Grad, Callable[[], Array]]:
    return _gather(run, x), lambda dx: _scatter(run, dx), lambda: _gather(run, x)


def leave(run: Run, partial: Array) -> tuple[Array, Grad]:
    return _scatter(run, partial), lambda dy: _gather(run, dy)
