"""Failures, checkpoints, goodput: how much of the wall clock is training.

* Mean time to interruption of a job on n GPUs: M = 1000 x 24 h x 8 / (rate x n), rate in interruptions per 1,000 node-days of 8 GPUs.
* Young, first order: tau = sqrt(2 d M), d the time that a save blocks (Young 1974, doi:10.1145/361147.361115).
* Daly, higher order: tau = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37).
* Goodput with exponential failures, a restart taking R: g = tau / (M e^(R/M) (e^((tau + d)/M) - 1)) (Daly 2006, equation 20).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, expm1, inf, prod, sqrt

import numpy as np

from ..catalog.facts import failures_per_1000_node_days
from ..frameworks import FRAMEWORKS
from ..frameworks.dtypes import dtypes
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.optimizer import OPTIMIZERS
from ..spec.plan import Structure
from .parameters import optimizer_state

GPUS_OF_A_NODE = 8
STORAGE_BYTES_PER_S_PER_GPU = (
    2e12 / 16384
)  # Llama 3: 2 TB/s sustained for 16,384 GPUs (arXiv:2407.21783 section 3.3.1); BLOOM's 57 GB/s for 384 is 0.15 GB/s
RESTART_S = (
    600.0  # detect, replace, start, load; Llama 3's effective time above 90 % at one interruption in 3.1 h leaves at most 14 minutes
)


@dataclass(frozen=True)
class Reliability:
    """How a job on a number of GPUs fails and saves. Times in seconds."""

    mean_time_to_interruption_s: float
    checkpoint_bytes: float
    checkpoint_blocking_s: float
    restart_s: float
    checkpoint_interval_s: float
    goodput: float


def mean_time_to_interruption(gpus: int, per_1000_node_days: float | None = None, per_job_hour: float = 0.0) -> float:
    """Seconds. `per_job_hour` adds what does not grow with size (users, software): 1 in 10.9 h on Meta's RSC (arXiv:2410.21680), 0 by default."""
    rate = failures_per_1000_node_days() if per_1000_node_days is None else per_1000_node_days
    per_hour = rate * gpus / GPUS_OF_A_NODE / (1000 * 24) + per_job_hour
    return 3600 / per_hour if per_hour > 0 else inf


def young(blocking_s: float, mtti_s: float) -> float:
    """Seconds of training between two saves, first order."""
    return sqrt(2 * blocking_s * mtti_s)


def daly(blocking_s: float, mtti_s: float) -> float:
    """Seconds of training between two saves."""
    if mtti_s == inf:
        return inf
    if blocking_s >= 2 * mtti_s:
        return mtti_s
    ratio = blocking_s / (2 * mtti_s)
    return sqrt(2 * blocking_s * mtti_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - blocking_s


def goodput(interval_s: float, blocking_s: float, restart_s: float, mtti_s: float) -> float:
    """Share of the wall clock that is training which is kept."""
    if mtti_s == inf:
        return 1.0 if interval_s == inf else interval_s / (interval_s + blocking_s)
    exponent = (interval_s + blocking_s) / mtti_s
    if exponent > 700 or restart_s / mtti_s > 700:  # e^700 is the largest that a float holds: nothing is ever finished
        return 0.0
    return interval_s / (mtti_s * exp(restart_s / mtti_s) * expm1(exponent))


def checkpoint_bytes(model: ModelSpec, job: TrainingJob, structure: Structure) -> float:
    """What the optimizer steps and its states, and 16-bit weights where the framework saves them beside fp32 masters: of AdamW in bf16 12 bytes a parameter
    with PyTorch, 14 with Megatron-Core and DeepSpeed. LoRA saves its adapters."""
    framework = FRAMEWORKS[structure.framework]
    types, optimizer = dtypes(framework, job, structure, alone=False), replace(OPTIMIZERS[job.optimizer], step_bytes=0)
    each = types.stepped + (types.stored if types.masters and framework.saves_copies else 0)

    def size(shape: tuple[int, ...], matrix: bool) -> int:
        dims = [np.array(d) for d in shape]
        return each * prod(shape) + int(optimizer_state(optimizer, dims, types.stepped, matrix=matrix))

    if job.method != "full":
        return float(sum(n * size((rank, width), True) for n, rank, width in adapter_matrices(model, job)))
    blocks = [(model.embedding, 1, False), (model.head, 1, False), *((block, count, True) for block, count in model.counts)]
    return float(sum(n * size(w.shape, matrix) for block, n, matrix in blocks for op in block.ops for w in op.weights))


def adapter_parameters(model: ModelSpec, job: TrainingJob) -> int:
    """LoRA: rank x (inputs + outputs) for each product that it targets (arXiv:2106.09685)."""
    return sum(n * rank * width for n, rank, width in adapter_matrices(model, job))


def adapter_matrices(model: ModelSpec, job: TrainingJob) -> Iterator[tuple[int, int, int]]:
    """(how many, rank, inputs or outputs) of LoRA's matrices."""
    for block, count in model.counts:
        for op in block.ops:
            if op.kind in ("linear", "grouped_linear") and op.name in job.lora_targets:
                for width in (op.k, op.width):
                    yield count * max(1, op.experts), job.lora_rank, width


def reliability(
    model: ModelSpec,
    job: TrainingJob,
    structure: Structure,
    gpus: int,
    *,
    per_1000_node_days: float | None = None,
    per_job_hour: float = 0.0,
    storage_bytes_per_s: float | None = None,
    restart_s: float = RESTART_S,
) -> Reliability:
    """Daly's interval and the goodput it gives, saving all ranks' shards at once to shared storage and waiting for it; a restart also reads it back."""
    mtti = mean_time_to_interruption(gpus, per_1000_node_days, per_job_hour)
    size = checkpoint_bytes(model, job, structure)
    blocking = size / (storage_bytes_per_s or STORAGE_BYTES_PER_S_PER_GPU * gpus)
    interval = daly(blocking, mtti)
    return Reliability(mtti, size, blocking, restart_s + blocking, interval, goodput(interval, blocking, restart_s + blocking, mtti))
