"""A plan's real run on this machine beside what was predicted: losses and gradients against one device, collectives, step times of several layouts.

`trainwright.train.measure_runs` runs; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from .compare import rank_correlation

if TYPE_CHECKING:
    from ..cost.estimate import Estimate

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 1e-7  # fp32, three steps, against one device
MEAN_ERROR, LEAST_CORRELATION = 0.15, 0.9
SCALAR_BYTES = 64  # losses, norms, token counts: agreed on by every trainer, planned by none
MEMORY_TOLERANCE = 0.05  # of allocated, reserved and device bytes on a GPU


@dataclass(frozen=True)
class RealRow:
    """One number both ways. `error` is predicted / measured - 1, or the difference where the two should be equal."""

    what: str
    predicted: float | None
    measured: float | None
    unit: str
    error: float | None
    within: bool


@dataclass(frozen=True)
class RealVerification:
    """What was held against a real run; `within` where every row is, and the summary of the step times too."""

    rows: tuple[RealRow, ...]
    summary: Mapping[str, float] = field(default_factory=dict)
    machine: str = ""
    skipped: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        return all(r.within for r in self.rows) and self.times_within

    @property
    def times_within(self) -> bool:
        s = self.summary
        if not s:
            return True
        return s["mean_error"] < MEAN_ERROR and s.get("rank_correlation", 1.0) > LEAST_CORRELATION

    def to_dict(self) -> dict[str, Any]:
        return {
            "within": self.within,
            "machine": self.machine,
            "rows": [dict(vars(r)) for r in self.rows],
            "summary": dict(self.summary),
            "skipped": list(self.skipped),
        }


def loss_rows(reference: Mapping[str, Any], found: Mapping[str, Any]) -> list[RealRow]:
    """Losses step by step, and the largest difference of any gradient, against one device."""
    rows = []
    for i, (one, many) in enumerate(zip(reference["losses"], found["losses"]), 1):
        difference = many - one
        rows.append(
            RealRow(f"loss of step {i}, one device and this layout", one, many, "loss", difference, abs(difference) <= LOSS_TOLERANCE)
        )
    worst = found.get("gradient_difference")
    if worst is not None:
        rows.append(
            RealRow(f"largest difference in {found['gradients']} gradients", 0.0, worst, "gradient", worst, worst <= GRADIENT_TOLERANCE)
        )
    return rows


def message_rows(estimate: Estimate, messages: Sequence[Iterable[Sequence[Any]]]) -> list[RealRow]:
    """Bytes and calls of every collective and of what is sent to another stage in one step, by mesh axis, for each rank of the pipeline on its own.

    `messages[rank]` holds (axis, collective, bytes, calls); ``scalar`` is not planned.
    """
    rows = []
    for rank, found in enumerate(messages):
        predicted = estimate.sent_by(rank, least_bytes=SCALAR_BYTES + 1)
        measured = {(axis, kind): (payload, calls) for axis, kind, payload, calls in found if axis != "scalar"}
        for key in sorted({*predicted, *measured}):
            name = f"{_name(estimate, key[0])} {key[1]}" + (f" of pipeline rank {rank}" if len(messages) > 1 else "")
            for unit, a, b in zip(("bytes", "calls"), predicted.get(key, (0, 0)), measured.get(key, (0, 0))):
                rows.append(RealRow(f"{name}, {unit}", a, b, unit, a - b, a == b))
    return rows


def _name(estimate: Estimate, axis: str) -> str:
    """All ranks are a group of whatever axes span them."""
    plan = estimate.plan
    sizes = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp * plan.cp, "ep": plan.ep}
    return "/".join(name for name, size in sizes.items() if size == plan.gpus) or "all ranks" if axis == "world" else axis


def pace(found: Sequence[Mapping[str, Any]], calibrated_s: float | None) -> float:
    """How many times as long as when it was calibrated this machine takes for the same work (`train.pulse`): of each layout the shortest pulse, as of its
    steps, and the median over layouts. 1 where nobody took a pulse, then or now."""
    now = [min(entry["pulse"]) for entry in found if entry.get("pulse")]
    return median(now) / calibrated_s if now and calibrated_s else 1.0


def time_rows(
    names: Sequence[str], estimates: Sequence[Estimate], found: Sequence[Mapping[str, Any]], calibrated_s: float | None = None
) -> tuple[list[RealRow], dict[str, float]]:
    """Step times with signed errors, and their summary; predictions are at the machine's present `pace`. On a GPU the allocator's bytes and MFU as well."""
    rows, predicted, measured = [], [], []
    slower = pace(found, calibrated_s)
    for name, estimate, entry in zip(names, estimates, found):
        if "seconds" not in entry:
            continue
        seconds = min(entry["seconds"])
        expected = estimate.step_s * slower
        predicted.append(expected)
        measured.append(seconds)
        rows.append(RealRow(f"step of {name}", expected, seconds, "s", expected / seconds - 1, True))
        rows += _gpu_rows(name, estimate, entry.get("memory") or {}, seconds)
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured)]
    if not errors:
        return rows, {}
    summary = {"layouts": float(len(errors)), "mean_error": sum(errors) / len(errors), "largest_error": max(errors), "pace": slower}
    correlation = rank_correlation(predicted, measured)
    if correlation is not None and len(errors) > 2:
        summary["rank_correlation"] = correlation
    return rows, summary


def _gpu_rows(name: str, estimate: Estimate, memory: Mapping[str, int], seconds: float) -> list[RealRow]:
    if not memory:
        return []
    m = estimate.memory_dict()
    ours = {"allocated": m["peak_bytes"] - m["breakdown"]["framework"], "reserved": m["reserved_bytes"], "device": m["device_bytes"]}
    rows = []
    for kind, value in ours.items():
        error = value / max(memory[kind], 1) - 1
        rows.append(RealRow(f"{kind} memory of {name}", value, memory[kind], "bytes", error, abs(error) <= MEMORY_TOLERANCE))
    mfu = estimate.to_dict()["throughput"]["mfu"]
    rows.append(
        RealRow(
            f"MFU of {name}", mfu, mfu * estimate.step_s / seconds, "of the peak", estimate.step_s and seconds / estimate.step_s - 1, True
        )
    )
    return rows
