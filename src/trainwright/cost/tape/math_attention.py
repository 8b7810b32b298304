"""``scaled_dot_product_attention`` in its math backend on the tape: every matrix in memory, and in fp32.

Source: torch 2.13 aten/src/ATen/native/transformers/attention.cpp, `_scaled_dot_product_attention_math`, checked against allocation traces. 16-bit
inputs are copied to fp32; the causal mask is one float matrix of the sequence; query and key are scaled one by one; the scaled query, the mask and the
copies live until the function returns, the 16-bit probabilities (its second result) a little longer.
"""

from __future__ import annotations

from . import ops
from .machine import Run, Tensor
from .sizes import Size

FP32 = 4


def math_attention(r: Run, q: Tensor, k: Tensor, v: Tensor, scores: Size, mask: Size, out: Size, loose: tuple[bool, bool, bool]) -> Tensor:
    """`scores` and `mask` are elements; a batched product copies an input that is `loose`: not contiguous by head."""
    dtype = q.dtype
    q32, k32, v32 = (ops.cast(r, t, FP32) for t in (q, k, v))
    query = ops.scale(r, q32)
    whole = r.new(mask, 1, "causal mask")
    lower = r.new(mask, 1, "causal mask")
    del whole
    added = r.new(mask, FP32, "causal mask")
    del lower
    key = ops.scale(r, k32)
    query2 = ops.copied(r, query) if loose[0] else query
    key2 = ops.copied(r, key) if loose[1] else key
    raw = ops.batched(r, query2, key2, scores, "scores")
    del query2, key, key2
    masked = ops.plus_constant(r, raw)
    del raw
    probabilities = ops.softmax(r, masked)
    del masked
    narrow = r.like(probabilities, "16-bit probabilities", dtype) if dtype != FP32 else None
    value = ops.copied(r, v32) if loose[2] else v32
    product = ops.batched(r, probabilities, value, out, "attention times values")
    del value
    result = ops.cast(r, ops.rows(r, product) if loose[0] else product, dtype)
    del product, probabilities, query, added, q32, k32, v32, narrow
    contiguous = ops.copied(r, result)
    del result
    return contiguous
