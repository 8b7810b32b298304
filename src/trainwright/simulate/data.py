"""Data parallelism: who gets which sequences, and what one token's loss counts.

The gradient of the mean loss over all tokens is the sum over ranks of (sum of its tokens' gradients) / (all tokens). Averaging the ranks' own means is the
same only where every rank has as many tokens; with unequal shares each token of a small share counts more. Likewise for microbatches under accumulation: the
fault that Hugging Face's trainer and others had until October 2024 was dividing each microbatch by its own count of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .collectives import Array, bounds
from .context import positions_of
from .layout import Coordinate, Layout
from .model import Batch


@dataclass(frozen=True)
class Micro:
    """One rank's part of one microbatch: tokens and targets (sequences, local length), their positions, and each token's capacity group."""

    tokens: Array
    targets: Array
    positions: Array
    groups: Array
    number: int = 0

    @property
    def valid(self) -> int:
        return int((self.targets >= 0).sum())


def sequences_of(layout: Layout, data_parallel_rank: int, batch: int) -> list[tuple[int, int]]:
    """(first, end) sequence of each microbatch of one data-parallel rank; shares differ by one where the batch does not divide."""
    lo, hi = bounds(batch, layout.data_parallel)[data_parallel_rank]
    return [(lo + a, lo + b) for a, b in bounds(hi - lo, layout.microbatches)]


def micros(layout: Layout, at: Coordinate, batch: Batch, groups: Array | None = None) -> list[Micro]:
    """This rank's microbatches. `groups` (sequences, length): capacity groups; left out, a rank's microbatch is one."""
    sequences, length = batch.shape
    where = positions_of(length, layout.cp, layout.cp_balance)[at.cp]
    found = []
    for number, (lo, hi) in enumerate(sequences_of(layout, at.replicate * layout.dp_shard + at.shard, sequences)):
        part = groups[lo:hi][:, where] if groups is not None else np.zeros((hi - lo, len(where)), int)
        found.append(Micro(batch.tokens[lo:hi][:, where], batch.targets[lo:hi][:, where], where, part.reshape(-1), number))
    return found


def capacity_groups(layout: Layout, batch: int, length: int) -> Array:
    """Which (rank, microbatch) each token of the batch belongs to under `layout`: what one device needs to drop the same tokens."""
    groups = np.zeros((batch, length), int)
    number = 0
    for rank in range(layout.data_parallel):
        for lo, hi in sequences_of(layout, rank, batch):
            for where in positions_of(length, layout.cp, layout.cp_balance):
                groups[lo:hi, where] = number
                number += 1
    return groups


def token_weight(layout: Layout, all_tokens: int, rank_tokens: int, micro_tokens: int) -> float:
    """What one token's loss counts in the batch's loss under the layout's way of averaging."""
    if layout.average == "tokens":
        return 1 / max(all_tokens, 1)
    if layout.average == "ranks":
        return 1 / (layout.data_parallel * max(rank_tokens, 1))
    return 1 / (layout.data_parallel * layout.microbatches * max(micro_tokens, 1))
