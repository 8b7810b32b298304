"""Signed errors of predictions, their summaries by any key, and how often the interval holds the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .record import RunRecord

if TYPE_CHECKING:
    from ..cost.estimate import Estimate


@dataclass(frozen=True)
class Comparison:
    """One record and its estimate. Errors are predicted / measured - 1; None where nothing was measured."""

    record: RunRecord
    estimate: Estimate

    @property
    def time_error(self) -> float | None:
        return None if self.record.step_s is None else self.estimate.step_s / self.record.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        return None if self.record.peak_bytes is None else self.predicted_peak / self.record.peak_bytes - 1.0

    @property
    def predicted_peak(self) -> int:
        """The estimate's number that means what was measured: allocated and active are live tensors, reserved the allocator's, device nvidia-smi's."""
        m = self.estimate.memory_dict()
        if self.record.peak_kind == "device":
            return int(m["device_bytes"])
        if self.record.peak_kind == "reserved":
            return int(m["reserved_bytes"])
        return int(m["peak_bytes"] - m["breakdown"]["framework"])

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the 80 % interval."""
        if self.record.step_s is None:
            return None
        time, i = self.estimate.table.time, self.estimate.index
        return bool(time.low_s[i] <= self.record.step_s <= time.high_s[i])


@dataclass(frozen=True)
class Summary:
    """Of signed relative errors, as fractions: median, mean and 90th percentile of their size, the largest, and the median with its sign."""

    rows: int
    median: float
    mean: float
    p90: float
    largest: float
    bias: float


def summarize(errors: Iterable[float | None]) -> Summary | None:
    """None where there is no error to summarize."""
    known = np.array([e for e in errors if e is not None], dtype=np.float64)
    if not len(known):
        return None
    size = np.abs(known)
    return Summary(
        len(known), float(np.median(size)), float(size.mean()), float(np.quantile(size, 0.9)), float(size.max()), float(np.median(known))
    )


def by_key(rows: Sequence[Comparison], key: Callable[[Comparison], str], error: Callable[[Comparison], float | None]) -> dict[str, Summary]:
    """One summary a key, keys in alphabetical order; keys without a measurement are left out."""
    groups: dict[str, list[float | None]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(error(row))
    found = {k: summarize(v) for k, v in sorted(groups.items())}
    return {k: s for k, s in found.items() if s is not None}


def coverage(rows: Iterable[Comparison]) -> float | None:
    """Share of measured steps inside their 80 % interval."""
    known = [r.inside for r in rows if r.inside is not None]
    return sum(known) / len(known) if known else None


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's rho (ties get their mean rank); None where either side has a single value."""
    a, b = _ranks(predicted), _ranks(measured)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    ordered, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_rank = (ends - counts + ends - 1) / 2
    return [float(mean_rank[i]) for i in inverse.reshape(-1)] if len(ordered) else []
