"""Number formats: bytes an element and the name that PyTorch gives them."""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp4"]
DTYPE_BYTES: dict[str, float] = {
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "fp4": 0.5,
    "int4": 0.5,
    "nf4": 0.5,
}


def activation_dtype(precision: str) -> str:
    """What tensors between products are held in: fp8 and fp4 are formats of products only, around them everything is bf16."""
    return "bf16" if precision in ("fp8", "fp4") else precision


def activation_bytes(precision: str) -> int:
    """Bytes an element of an activation."""
    return int(DTYPE_BYTES[activation_dtype(precision)])
