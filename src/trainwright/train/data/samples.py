"""Sequences of one length out of a stream of tokens: cut one after the other, or packed so that documents stay whole.

A sample is four rows of `seq_len` int64: tokens, labels (the next token; -100 where there is none), positions, documents (None where attention may see all).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import SpecError
from .tokens import Tokens

IGNORED = -100
Sample = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


class Samples(Protocol):
    def __len__(self) -> int: ...

    def get(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Cut:
    """Sample i is the tokens from i x seq_len on; its last label is the first token of the next one. Documents run into each other."""

    tokens: Tokens
    seq_len: int

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise SpecError(
                f"holds {len(self.tokens):,} tokens, one sample takes {self.seq_len + 1:,}",
                self.tokens.path,
                [f"seq_len {len(self.tokens) - 1}"],
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def get(self, index: int) -> Sample:
        start = index * self.seq_len
        window = np.asarray(self.tokens.values[start : start + self.seq_len + 1], np.int64)
        return window[:-1], window[1:], np.arange(self.seq_len), None


class Packed:
    """Documents packed by best fit, longest first (Ding et al. 2024, "Fewer truncations improve language modeling"): only what is longer than a sequence is
    cut. Positions start again with each document, its last token has no label, and what is left over is padding of document -1."""

    def __init__(self, tokens: Tokens, seq_len: int, padding: int = 0) -> None:
        self.tokens, self.seq_len, self.padding = tokens, seq_len, padding
        ends = tokens.document_ends()
        starts, lengths = pieces(ends, seq_len)
        self.order, self.bounds = pack(lengths, seq_len)
        self.starts, self.lengths = starts, lengths
        self.fill = float(lengths.sum()) / (seq_len * max(1, len(self)))
        if not len(self) or int(lengths.max()) < 2:
            raise SpecError("no document holds two tokens: there is nothing to predict", tokens.path)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def get(self, index: int) -> Sample:
        size = self.seq_len
        tokens, labels = np.full(size, self.padding, np.int64), np.full(size, IGNORED, np.int64)
        positions, documents = np.zeros(size, np.int64), np.full(size, -1, np.int64)
        at = 0
        for number, piece in enumerate(self.order[self.bounds[index] : self.bounds[index + 1]]):
            start, length = int(self.starts[piece]), int(self.lengths[piece])
            here = slice(at, at + length)
            tokens[here] = self.tokens.values[start : start + length]
            labels[at : at + length - 1] = tokens[at + 1 : at + length]
            positions[here], documents[here] = np.arange(length), number
            at += length
        positions[at:] = np.arange(size - at)
        return tokens, labels, positions, documents


def pieces(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of each piece: a document, or what of it fits into `seq_len` tokens."""
    begins = np.concatenate([[0], ends[:-1]])
    counts = -(-(ends - begins) // seq_len)
    which = np.repeat(np.arange(len(ends)), counts)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[which] + inside * seq_len
    return starts, np.minimum(seq_len, ends[which] - starts)


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: bin b holds the pieces order[bounds[b] : bounds[b + 1]]. Deterministic: ties go to the earlier piece and the older bin."""
    room: dict[int, list[int]] = {}  # free tokens -> bins that have just so many, oldest first
    sizes: list[int] = []  # the keys of `room`, sorted
    bins: list[list[int]] = []
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(sizes, length)
        if at < len(sizes):
            free = sizes[at]
            chosen = heapq.heappop(room[free])
            if not room[free]:
                del room[free]
                sizes.pop(at)
        else:
            free, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        left = free - length
        if left > 0:
            if left not in room:
                room[left] = []
                sizes.insert(bisect_left(sizes, left), left)
            heapq.heappush(room[left], chosen)
    order = np.asarray([p for b in bins for p in b], np.int64)
    return order, np.concatenate([[0], np.cumsum([len(b) for b in bins])]).astype(np.int64)


def samples_of(tokens: Tokens, seq_len: int, packing: bool) -> Samples:
    return Packed(tokens, seq_len, tokens.end or 0) if packing else Cut(tokens, seq_len)
