"""Attention over the ranks of context parallelism on the tape, as PyTorch runs it: keys and values go round (or are gathered once), partial results are merged
in fp32, gradients of keys and values travel behind.

Source: torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py (`_templated_ring_attention` and its backward, load-balanced, rank 0),
checked against allocation traces. The steps after the fourth allocate what the fourth does.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Run, Tensor
from .sizes import Size, plus

FP32, STATE, BUFFER = 4, 24, "communication_buffers"
MOST = 4  # steps that differ


def half(size: Size) -> Size:
    return tuple((symbol, count // 2) for symbol, count in size)


@dataclass(frozen=True)
class Ring:
    """Sizes of one rank in elements; `everyone`: keys and values of all ranks, where they are gathered (empty: they go round)."""

    query: Size
    key: Size
    value: Size
    rows: Size
    one: Size
    everyone: Size
    steps: int

    @property
    def both(self) -> Size:
        return plus(self.key, self.value)

    def send(self, r: Run, size: Size, dtype: int) -> Tensor:
        """A message and what waiting for it returns."""
        coming = r.new(size, dtype, "keys and values on their way", BUFFER)
        arrived = r.new(size, dtype, "keys and values that came", BUFFER)
        del coming
        return arrived

    def exchange(self, r: Run, dtype: int, before: Tensor | None) -> Tensor:
        if not self.everyone:
            return self.send(r, self.both, dtype)
        return before or self.send(r, self.everyone, dtype)


def attention(r: Run, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Saves what flash attention of this rank's part saves; the log-sum-exp is that of all steps."""
    dtype = q.dtype
    wanted = r.recording and any(t.needs_grad for t in (q, k, v))
    out, rows, state = _forward(r, ring, dtype)
    if wanted:
        saved = [r.pack(t.view()) for t in (q, k, v, out, rows, state)]
        out.node = r.node("ring attention", [q.node, k.node, v.node], saved, lambda r, saved, g: _backward(r, ring, dtype))
    return out


def _forward(r: Run, ring: Ring, dtype: int) -> tuple[Tensor, Tensor, Tensor]:
    key, value = r.new(ring.key, dtype, "contiguous"), r.new(ring.value, dtype, "contiguous")
    used: list[Tensor] = []
    coming: Tensor | None = None
    merged = total = out = rows = state = None
    for i in range(ring.steps):
        if i > 0:
            assert coming is not None
            key = value = coming
        if i < ring.steps - 1:
            packed = r.new(ring.both, dtype, "keys and values", BUFFER)
            coming = ring.exchange(r, dtype, coming)
            del packed
        used[:] = [key, value]
        part = ring.query if i == 0 else half(ring.query)
        out, rows, state = _flash(r, part, ring.rows if i == 0 else half(ring.rows), ring.one, dtype)
        wide = out if dtype == FP32 else r.new(part, FP32, "partial attention")
        merged, total = (wide, rows) if merged is None or total is None else _merge(r, ring, wide, merged, total)
        del wide
    assert merged is not None
    assert total is not None
    assert state is not None
    result = merged if dtype == FP32 else r.new(ring.query, dtype, "ring attention")
    return result, total, state


def _flash(r: Run, query: Size, rows: Size, one: Size, dtype: int) -> tuple[Tensor, Tensor, Tensor]:
    return r.new(query, dtype, "flash attention"), r.new(rows, FP32, "flash attention"), r.new(one, STATE, "flash attention")


def _merge(r: Run, ring: Ring, wide: Tensor, merged: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of the rows, weighed by their log-sum-exp, and both halves together again."""
    size, rows = half(ring.query), half(ring.rows)
    weight = r.new(rows, FP32, "merge")
    difference = r.new(size, FP32, "merge")
    product = r.new(size, FP32, "merge")
    del weight, difference
    updated = r.new(size, FP32, "merge")
    del product
    sums = r.new(rows, FP32, "merge")
    total = r.new(ring.rows, FP32, "log-sum-exp")
    merged = r.new(ring.query, FP32, "merged attention")
    del sums, updated
    return merged, total


def _backward(r: Run, ring: Ring, dtype: int) -> list[Tensor | None]:
    sums = [r.new(size, FP32, "ring gradients") for size in (ring.query, ring.key, ring.value)]
    query, travelers = sums[0], sums[1:]
    del sums
    key, value = r.new(ring.key, dtype, "contiguous"), r.new(ring.value, dtype, "contiguous")
    used: list[Tensor] = []
    made: list[Tensor] = []
    coming = behind = packed = sent = None
    for i in range(ring.steps):
        if i > 0:
            assert coming is not None
            key = value = coming
        if i < ring.steps - 1:
            packed = r.new(ring.both, dtype, "keys and values", BUFFER)
            coming = ring.exchange(r, dtype, coming)
        used[:] = [key, value] if i == 0 else [key, value, r.new(half(ring.rows), FP32, "contiguous")]
        made[:] = [
            r.new(size, dtype, "flash attention backward") for size in (ring.query if i == 0 else half(ring.query), ring.key, ring.value)
        ]
        if i == 0:
            copies = [r.new(size, FP32, "contiguous") for size in (ring.key, ring.value)]
            sent = r.new(ring.both, FP32, "gradients of keys and values", BUFFER)
            copies.clear()
        else:
            assert behind is not None
            sent = behind
            travelers[:] = [behind]
            sent = r.new(ring.both, FP32, "gradients of keys and values", BUFFER)
        behind = ring.send(r, ring.both, FP32)
        if i > 0:
            query = r.new(ring.query, FP32, "ring gradients")
    assert behind is not None
    if dtype != FP32:
        query = r.new(ring.query, dtype, "ring attention backward")
    last = behind if dtype == FP32 else r.new(ring.both, dtype, "ring attention backward")
    del packed, sent
    return [query, Tensor(ring.key, dtype, last.storage), Tensor(ring.value, dtype, last.storage)]
