"""The 80 % interval of a step time, from how far predictions of that kind of case were off on published runs."""

from __future__ import annotations

from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .kernels import Constants, Rates


def spread(
    model: ModelSpec, job: TrainingJob, structure: Structure, rate: Rates, table: Constants, measured: bool = False
) -> tuple[float, float]:
    """(low, high) factors on the step: 1 / (1 + w) and 1 + w with the width w of its kind in `kernels.toml` [interval]."""
    width = table["interval"][kind_of(model, job, structure, rate, measured)]
    return 1.0 / (1.0 + width), 1.0 + width


def kind_of(model: ModelSpec, job: TrainingJob, structure: Structure, rate: Rates, measured: bool = False) -> str:
    """The kind of a case: the first of these that it is."""
    kinds = {
        "offload": structure.offload != "none",
        "adapters": job.method != "full",
        "relative": bool(rate.relative),
        "measured": measured,
        "moe": model.is_moe,
        "fp4": job.precision == "fp4",
        "fp8": job.precision == "fp8",
        "materialized_scores": structure.attention in ("eager", "sdpa-math"),
        "megatron": structure.framework in ("megatron", "deepspeed"),
        "fsdp": True,
    }
    return next(name for name, holds in kinds.items() if holds)
