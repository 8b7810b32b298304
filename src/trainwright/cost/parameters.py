"""Whole bytes that a rank owns: parameters, gradients, optimizer states, from the tensors of a model and how they are cut.

Sources: torch.optim (states are made like the parameter), ZeroRedundancyOptimizer._partition_parameters, FSDP2 (dimension 0 cut into
ceil(rows / ranks)), bitsandbytes (block-wise 8-bit states).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..spec.optimizer import Optimizer
from .table import IntColumn

FP32 = 4


def product(dims: Sequence[IntColumn]) -> IntColumn:
    total = dims[0].copy()
    for d in dims[1:]:
        total *= d
    return total


def optimizer_state(opt: Optimizer, dims: Sequence[IntColumn], stored: int, *, matrix: bool = True) -> IntColumn:
    """Bytes of the states of one tensor with local dimensions `dims`, kept in `stored` bytes an element.

    `matrix`: a hidden weight, which Muon treats as such (embedding and head are AdamW's). Blocks of 8-bit states have an fp32 scale each.
    """
    elements = product(dims)
    copies = opt.copies
    if opt.matrix_copies is not None and matrix and len(dims) >= 2:
        return opt.matrix_copies * stored * elements
    if opt.factored and len(dims) >= 2:
        last = dims[-1]
        return stored * (elements // np.maximum(1, last) + elements // np.maximum(1, dims[-2])) + opt.step_bytes
    if opt.bytes_per_element is None:
        return copies * stored * elements + opt.step_bytes
    blocks = -(-elements // max(1, opt.block)) if opt.block else np.zeros_like(elements)
    small = copies * FP32 * elements
    quantized = (copies * opt.bytes_per_element * elements).astype(np.int64) + copies * FP32 * blocks
    return np.where(elements < opt.min_elements, small, quantized) + opt.step_bytes


def greedy_partition(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """ZeroRedundancyOptimizer: tensors by elements, largest first (stable), each to the rank with least so far (the first of equals).

    Returns the positions of each rank's tensors.
    """
    loads = [0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[i]
        parts[rank].append(i)
    return parts
