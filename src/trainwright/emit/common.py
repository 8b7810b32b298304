"""Limits that several targets share, and numbers that several write."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from ..resolve import Run
from .base import Limit, only

DEFAULT_STEPS = 1000  # of a plan that does not say how many tokens the run has


def steps(run: Run) -> int:
    """Optimizer steps of the whole run."""
    return ceil(run.job.tokens / run.job.tokens_per_step) if run.job.tokens else DEFAULT_STEPS


def tokens_of(count: int | None, batch: int | None, seq_len: int | None) -> float | None:
    """The tokens that so many steps see; within one step of what the plan said."""
    return float(count * batch * seq_len) if count and batch and seq_len else None


def nothing_but_full_precision(why: str) -> Limit:
    """fp32 masters wherever the compute type has 16 bits or fewer."""
    return Limit(
        "training.master_weights",
        lambda run: run.job.precision == "fp32" or run.job.master_weights == "fp32",
        why,
        lambda run: {"training.master_weights": "fp32"},
    )


def plain_layers(why: str) -> tuple[Limit, ...]:
    """No launches as graphs, no tensor-parallel overlap, no weights or products in fp8."""
    return (
        only("strategy.cuda_graphs", [False], why),
        only("strategy.async_tp", [False], why),
        only("strategy.fp8_params", [False], why),
        only("training.fp8_recipe", [None], why),
    )


def options_among(names: Iterable[str], why: str) -> Limit:
    """The framework's own knobs that the target has a place for."""
    known = tuple(names)
    return Limit(
        "strategy.options",
        lambda run: all(name in known for name, _ in run.plan.structure.options),
        why,
        lambda run: {"strategy.options": {k: v for k, v in run.plan.structure.options if k in known}},
    )


def no_axis(*axes: str, why: str) -> tuple[Limit, ...]:
    """Degrees that the target cannot raise above 1."""
    return tuple(only(f"strategy.{axis}", [1], why) for axis in axes)


def gradient_like(run: Run) -> str:
    """The type in which accelerate's FSDP plugin reduces gradients: that of the products."""
    return "fp32" if run.job.precision == "fp32" else run.job.precision


__all__ = ["gradient_like", "no_axis", "nothing_but_full_precision", "options_among", "plain_layers", "steps", "tokens_of"]
