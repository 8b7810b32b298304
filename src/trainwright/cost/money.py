"""Days, GPU-hours, dollars of a whole run.

steps = tokens / (sequence length x global batch); days = steps x step time / goodput / 86,400; GPU-hours = days x 24 x GPUs; dollars = GPU-hours x price.
The price is the cluster's: what was said, or the catalogue's default with its date.
"""

from __future__ import annotations

from typing import overload

from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from .table import Column

DAY_S = 86_400.0


def steps(job: TrainingJob) -> float | None:
    """Optimizer steps of the run; None where no number of tokens was said."""
    return None if job.tokens is None else job.tokens / job.tokens_per_step


@overload
def days(job: TrainingJob, step_s: float, goodput: float = 1.0) -> float | None: ...
@overload
def days(job: TrainingJob, step_s: Column, goodput: float | Column = 1.0) -> Column | None: ...
def days(job: TrainingJob, step_s: float | Column, goodput: float | Column = 1.0) -> float | Column | None:
    """Days on the clock, lost time included; infinite where goodput is 0."""
    count = steps(job)
    if count is None:
        return None
    if isinstance(goodput, float) and goodput == 0:
        return step_s * float("inf")
    return count * step_s / goodput / DAY_S


def usd(cluster: ClusterSpec, gpu_hours: float | None) -> float | None:
    if gpu_hours is None or cluster.usd_per_gpu_hour is None:
        return None
    return gpu_hours * cluster.usd_per_gpu_hour
