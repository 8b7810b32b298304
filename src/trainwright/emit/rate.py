"""The learning rate over a run, which no plan holds: warm-up, how it falls, where it ends; and the words of each engine for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..resolve import Run
from .base import Options
from .common import steps

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Rate:
    """`warmup` steps from 0 to `peak` in a straight line, then `shape` down to `least` at step `end`."""

    shape: str
    warmup: int
    peak: float
    least: float
    end: int


def rate_of(run: Run, options: Options, shape: str, warmup: int = 0, least: float = 0.0) -> Rate:
    """What the options say; where they say nothing, the target's own choice, which is given."""
    chosen = options.schedule or shape
    count = warmup if options.warmup_steps is None else options.warmup_steps
    # A rate that falls by somebody's own words falls to 0 unless they say where it ends.
    end = options.least_learning_rate if options.least_learning_rate is not None else 0.0 if options.schedule else least
    return Rate(chosen, min(count, steps(run)), options.learning_rate, options.learning_rate if chosen == "constant" else end, steps(run))


def deepspeed_scheduler(rate: Rate) -> dict[str, Any] | None:
    """DeepSpeed's ``scheduler``; None for a rate that never changes. Its linear one ends at 0 whatever the least rate is."""
    warm = {"warmup_num_steps": max(2, rate.warmup)}  # its smallest
    if rate.shape == "cosine":
        ends = {"warmup_min_ratio": 0.0, "cos_min_ratio": rate.least / rate.peak if rate.peak else 0.0, "warmup_type": "linear"}
        return {"type": "WarmupCosineLR", "params": {"total_num_steps": rate.end, **warm, **ends}}
    plain = {"warmup_min_lr": 0.0, "warmup_max_lr": rate.peak, **warm, "warmup_type": "linear"}
    if rate.shape == "linear":
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": rate.end, **plain}}
    return {"type": "WarmupLR", "params": plain} if rate.warmup else None


def trainer_scheduler(rate: Rate) -> dict[str, Any]:
    """Hugging Face's ``lr_scheduler_type`` and what belongs to it."""
    warm = {"warmup_steps": rate.warmup} if rate.warmup else {}
    if rate.shape == "constant":
        return {"lr_scheduler_type": "constant_with_warmup" if rate.warmup else "constant"} | warm
    if rate.shape == "cosine" and rate.least:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": rate.least}} | warm
    return {"lr_scheduler_type": rate.shape} | warm


def torchtitan_rate(run: Run, options: Options) -> dict[str, Any]:
    """torchtitan's ``lr_scheduler`` section, none where the options leave it to its registered configuration. A constant rate is one whose decay ends
    where it begins."""
    if options.schedule is None and options.warmup_steps is None:
        return {}
    rate = rate_of(run, options, "linear", 200)  # its own default
    least = 1.0 if rate.shape == "constant" else rate.least / rate.peak if rate.peak else 0.0
    shape = "linear" if rate.shape == "constant" else rate.shape
    return {"lr_scheduler": {"warmup_steps": rate.warmup, "decay_type": shape, "min_lr_factor": least}}
