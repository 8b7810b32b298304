"""What LoRA and QLoRA add to a block: two thin products beside each adapted one, kernels around them, and the base's weights made 16-bit again."""

from __future__ import annotations

import numpy as np

from ..spec.blocks import Block, Op
from ..spec.job import TrainingJob
from ..spec.precision import DTYPE_BYTES, activation_bytes
from .flops import Shares
from .kernels import Rates, matmul_seconds
from .parts import Part

KERNELS = 5  # a target: cast or dropout of the input, A, B, scale, sum
PASSES = 5.0  # of the output: scaled (read, write), summed (two reads, write)


def adapter_parts(block: Block, shares: Shares, job: TrainingJob, rate: Rates) -> tuple[list[Part], int]:
    """(parts, kernels of a forward pass). y + s B(A(x)): A is rank x k, B n x rank, both trained (arXiv:2106.09685; PEFT lora/layer.py).

    A quantized base (arXiv:2305.14314) reads its codes and writes 16-bit weights before every product, forward and backward.
    """
    if job.method == "full":
        return [], 0
    targets = [op for op in block.rows("linear", "grouped_linear") if op.name in job.lora_targets and op.weights]
    found, kernels = [], 0
    if targets:
        forward = np.zeros_like(shares.tokens)
        moved = np.zeros_like(shares.tokens)
        rank = np.full_like(shares.tokens, float(job.lora_rank))
        one = np.ones_like(rank)
        for op in targets:
            n, k = _local(op, shares)
            forward = forward + matmul_seconds(shares.tokens, rank, k, one, rate, job.precision)
            forward = forward + matmul_seconds(shares.tokens, n, rank, one, rate, job.precision)
            moved = moved + PASSES * n * shares.tokens * activation_bytes(job.precision)
        seconds = forward + moved / rate.bytes_per_s
        formula = "two products of the rank, and 5 passes over the output, for each target; backward twice"
        found.append(Part("adapters", "elementwise", seconds, 2.0 * seconds, formula, {"rank": rank, "bytes": moved}, "arXiv:2106.09685"))
        kernels = KERNELS * len(targets)
    if job.method == "qlora":
        code = DTYPE_BYTES[job.base_quantization or "nf4"]
        elements = np.zeros_like(shares.tokens)
        for op in block.rows("linear", "grouped_linear"):
            n, k = _local(op, shares)
            elements = elements + n * k * (np.maximum(op.experts / shares.ep, 1.0) if op.experts else 1.0)
        seconds = elements * (code + 2.0) / rate.bytes_per_s
        formula = "(bytes of a code + 2) x weights / bandwidth, before every product"
        found.append(Part("dequantization", "elementwise", seconds, seconds, formula, {"weights": elements}, "arXiv:2305.14314"))
        kernels += len(block.rows("linear"))
    return found, kernels


def _local(op: Op, shares: Shares) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and inputs of a product on one rank."""
    one = np.ones_like(shares.tokens)
    split = shares.etp if op.experts else shares.tp
    return op.width * one / (split if op.parallel == "column" else 1.0), op.k * one / (split if op.parallel == "row" else 1.0)
