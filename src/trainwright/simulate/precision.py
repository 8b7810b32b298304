"""Mixed precision with real rounding: FP16, BF16 and FP8 results, loss scaling, FP32 master weights.

Products are summed in FP32 (as tensor cores do) and their results rounded to the 16-bit format; FP8 rounds the inputs of each product with a scale per tensor
(E4M3 forward, E5M2 for gradients; Micikevicius et al. 2022). Loss scaling multiplies the loss before backward and divides the gradients after it, in FP32; the
dynamic scale halves on overflow, skips that step, and doubles after a number of good ones (Micikevicius et al. 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..errors import SpecError, unknown
from .collectives import Array
from .fsdp import Optimizer
from .layout import Layout
from .model import Batch, TinyConfig, initial
from .pipeline import plan
from .run import Run
from .world import Rank, World

FORMATS = ("fp32", "bf16", "fp16", "fp8")
_TYPES = {"bf16": "bfloat16", "fp8-e4m3": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2"}


@cache
def dtype_of(form: str) -> Any:
    """The NumPy dtype of ``fp32``, ``fp16``, ``bf16``, ``fp8-e4m3`` or ``fp8-e5m2``. The last three need the extra `precision`."""
    if form in ("fp32", "fp16"):
        return np.dtype(np.float32 if form == "fp32" else np.float16)
    if form not in _TYPES:
        raise unknown("format", form, ("fp32", "fp16", *_TYPES), "precision")
    try:
        import ml_dtypes
    except ImportError:
        raise SpecError(f"{form} needs the package ml_dtypes", "precision", "pip install 'trainwright[precision]'") from None
    return np.dtype(getattr(ml_dtypes, _TYPES[form]))


def rounded(x: Array, form: str) -> Array:
    """`x` as the format holds it, back in FP32; beyond its range infinity (E4M3: nan)."""
    if form == "fp32":
        return np.asarray(x, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(dtype_of(form)).astype(np.float32)


def limits(form: str) -> dict[str, float]:
    """Largest number, smallest normal, smallest at all, and the relative step."""
    if form in _TYPES:
        dtype_of(form)
        import ml_dtypes

        info: Any = ml_dtypes.finfo(dtype_of(form))
    else:
        info = np.finfo(dtype_of(form))
    return {
        "max": float(info.max),
        "smallest_normal": float(info.smallest_normal),
        "smallest": float(info.smallest_subnormal),
        "eps": float(info.eps),
    }


def scaled(x: Array, form: str) -> Array:
    """Rounded with a scale that puts the largest magnitude at the format's largest number ("current" per-tensor scaling)."""
    top = float(np.abs(x).max(initial=0.0))
    if top == 0 or not np.isfinite(top):
        return rounded(x, form)
    scale = np.float32(limits(form)["max"] / top)
    return rounded(x * scale, form) / scale


@dataclass(frozen=True)
class Policy:
    """What is kept and computed in which format. `scale` 0 is dynamic loss scaling (starting at `first_scale`), 1 none, else static."""

    compute: str = "bf16"
    master: bool = True
    scale: float = 1.0
    first_scale: float = 2.0**16
    growth_every: int = 200
    tokens: int = (
        0  # tokens that a step's loss is averaged over; the batch is one microbatch of them, and the others are alike (0: it is all)
    )

    def __post_init__(self) -> None:
        if self.compute not in FORMATS:
            raise unknown("precision", self.compute, FORMATS, "precision")
        if self.scale < 0 or not np.isfinite(self.scale):
            raise SpecError(f"a loss scale of {self.scale} is not a positive number (0 is dynamic)", "loss_scale", "0, 1, 65536")

    @property
    def storage(self) -> str:
        return "bf16" if self.compute == "fp8" else self.compute


@dataclass
class Record:
    """What happened: loss and scale per step, steps skipped for overflow, and how many gradient values became zero by rounding."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    gradients: int = 0
    underflowed: int = 0
    lost_updates: float = 0.0

    @property
    def underflow_share(self) -> float:
        return self.underflowed / max(self.gradients, 1)


class PrecisionRun(Run):
    """A run whose results are rounded as the policy says. Weights are FP32 masters read through a rounded copy, or exist in the 16-bit format only."""

    policy: Policy
    record: Record

    def start(self, policy: Policy) -> PrecisionRun:
        self.policy, self.record = policy, Record()
        self.scale = policy.scale or policy.first_scale
        self.good_steps, self.copies = 0, dict[str, Array]()
        if not policy.master:
            self._round_weights()
        return self

    def _round_weights(self) -> None:
        for bucket in self.store.buckets:
            bucket.owned = rounded(bucket.owned, self.policy.storage)
            bucket.full = bucket.owned

    def cast(self, x: Array) -> Array:
        return rounded(x, self.policy.storage)

    def cast_gradient(self, x: Array) -> Array:
        found = rounded(x, self.policy.storage)
        self.record.gradients += int(np.count_nonzero(x))
        self.record.underflowed += int(np.count_nonzero((found == 0) & (x != 0)))
        return found

    def operand(self, x: Array) -> Array:
        return scaled(x, "fp8-e4m3") if self.policy.compute == "fp8" else x

    def gradient_operand(self, x: Array) -> Array:
        return scaled(x, "fp8-e5m2") if self.policy.compute == "fp8" else x

    def weight(self, name: str) -> Array:
        if name not in self.copies:
            self.copies[name] = rounded(self.store.weight(name), self.policy.storage)
        return self.copies[name]

    def add(self, name: str, gradient: Array) -> None:
        self.store.add(name, self.cast_gradient(gradient))

    def upstream(self, weight: float) -> Any:
        if self.policy.tokens:
            weight = 1 / self.policy.tokens
        return np.float32(weight * self.scale)

    def update(self, number: int) -> None:
        """Unscale in FP32; on infinity or nan skip the step and halve the scale, else step, and double it after `growth_every` good ones."""
        finite = True
        alike = self.policy.tokens / self.step_tokens if self.policy.tokens else 1
        for bucket in self.store.buckets:
            if bucket.reduced is not None:
                bucket.reduced = bucket.reduced * np.float32(alike / self.scale)
                finite &= bool(np.isfinite(bucket.reduced).all())
        self.record.scales.append(self.scale)
        dynamic = self.policy.scale == 0
        if not finite:
            self.record.skipped.append(number)
            for bucket in self.store.buckets:
                bucket.reduced = None
            self.scale, self.good_steps = (self.scale / 2, 0) if dynamic else (self.scale, 0)
            return
        before = [b.owned for b in self.store.buckets]
        self.store.step(number - len(self.record.skipped))
        if not self.policy.master:
            self._round_weights()
            same = sum(int((a == b.owned).sum()) for a, b in zip(before, self.store.buckets))
            self.record.lost_updates += same / sum(b.size for b in self.store.buckets)
        self.copies.clear()
        self.good_steps += 1
        if dynamic and self.good_steps % self.policy.growth_every == 0:
            self.scale *= 2


def train(
    config: TinyConfig, policy: Policy, batches: Sequence[Batch], steps: int, *, seed: int = 0, optimizer: Optimizer | None = None
) -> Record:
    """Train on one device under `policy`, going round the batches. Losses are of the rounded model on each step's batch."""
    if steps < 1:
        raise SpecError(f"{steps} steps", "steps", "1")
    layout = Layout()
    actions = plan(config, layout)
    run = PrecisionRun(
        config, layout, actions, Rank(World(1), 0), initial(config, seed, np.float32), optimizer or Optimizer(), batches[0].shape[1]
    )
    run.start(policy)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for step in range(1, steps + 1):
            loss = run.step(step, batches[(step - 1) % len(batches)], None, actions)
            run.record.losses.append(float("nan") if loss is None else loss)
            run.ledger.moments.clear()
    run.record.lost_updates /= steps
    return run.record


def underflow(gradients: dict[str, Array], form: str, scale: float) -> float:
    """Share of the non-zero values that the format turns into zero after multiplying by `scale`."""
    flat = np.concatenate([g.reshape(-1) for g in gradients.values()])
    flat = flat[flat != 0]
    return float((rounded(flat * scale, form) == 0).mean()) if len(flat) else 0.0


__all__ = ["FORMATS", "Policy", "PrecisionRun", "Record", "dtype_of", "limits", "rounded", "scaled", "train", "underflow"]
