"""The 80 % interval of a step time, from how far predictions of that kind of case were off on published runs."""

from __future__ import annotations

from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .kernels import Constants, Rates


def spread(
    model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, rate: Rates, table: Constants
) -> tuple[float, float]:
    """(low, high) factors on the step: the widest of the kinds that the case belongs to."""
    law = table["interval"]
    half = law["base"]
    for kind in kinds(model, job, structure, rate):
        half = max(half, law.get(kind, 0.0))
    return 1.0 / (1.0 + half), 1.0 + half


def kinds(model: ModelSpec, job: TrainingJob, structure: Structure, rate: Rates) -> list[str]:
    """Kinds of case with residuals of their own, in `kernels.toml` [interval]."""
    found = [structure.framework]
    if model.is_moe:
        found.append("moe")
    if job.precision in ("fp8", "fp4"):
        found.append(job.precision)
    if job.method != "full":
        found.append("adapters")
    if rate.relative:
        found.append("relative")
    if structure.offload != "none":
        found.append("offload")
    return found
