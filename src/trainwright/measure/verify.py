"""Predicted against measured memory and messages of one rank, row by row. `trainwright.train.probe` measures; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import SpecError

if TYPE_CHECKING:
    from ..cost.estimate import Estimate

TOLERANCE_BYTES = 8192  # step counters, random states and other scalars
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class SentMessage:
    """A collective of a step: `payload_bytes` is the whole, unsharded payload of all `count` calls."""

    group: str
    collective: str
    ranks: int
    dtype: str
    count: int
    payload_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One step of one rank in bytes of live tensors: no allocator rounding, no context, no kernel scratch.

    Parameters, gradients and optimizer states are what the rank owns after backward; `saved_bytes` is what the first micro-batch's forward pass leaves
    behind, `phases` the most that was live in each phase. None and missing phases: a pipeline's phases overlap, they have none of their own. `rank` is the
    pipeline rank.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int | None
    after_forward_bytes: int | None
    after_backward_bytes: int
    peak_bytes: int
    phases: Mapping[str, int]
    messages: tuple[SentMessage, ...]
    rank: int
    software: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One number both ways. `kind` is ``memory`` or ``message`` (bytes), ``calls`` or ``rank`` (equal or not)."""

    what: str
    kind: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """Predicted minus measured."""
        return self.predicted - self.measured


@dataclass(frozen=True)
class Verification:
    """A run's estimate beside its measurement. `exact` where bytes are within `tolerance_bytes` and calls equal in every row."""

    estimate: Estimate
    measurement: Measurement
    tolerance_bytes: int = TOLERANCE_BYTES

    def __post_init__(self) -> None:
        if self.tolerance_bytes < 0:
            raise SpecError(f"{self.tolerance_bytes} is no number of bytes", "--tolerance", [TOLERANCE_BYTES])

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return (*self._memory(), *self._messages())

    def within(self, row: Row) -> bool:
        return abs(row.difference) <= (self.tolerance_bytes if row.kind in ("memory", "message") else 0)

    @property
    def exact(self) -> bool:
        return all(self.within(r) for r in self.rows)

    def _memory(self) -> Iterator[Row]:
        memory, m = self.estimate.memory_dict(), self.measurement
        states = memory["states"]
        yield Row("parameters", "memory", states["parameters"] + states["master_weights"], m.parameter_bytes)
        yield Row("gradients", "memory", states["gradients"], m.gradient_bytes)
        yield Row("optimizer states", "memory", states["optimizer"], m.optimizer_bytes)
        if m.saved_bytes is not None:
            yield Row("saved for backward", "memory", memory["saved_bytes"], m.saved_bytes)
        for phase in PHASES:
            if phase in m.phases:
                yield Row(f"most in {phase}", "memory", memory["phases"][phase], m.phases[phase])
        yield Row("peak", "memory", memory["peak_bytes"] - memory["breakdown"]["framework"], m.peak_bytes)
        if self.estimate.plan.pp > 1:
            yield Row("pipeline rank of the peak", "rank", memory["pipeline_rank"], m.rank)

    def _messages(self) -> Iterator[Row]:
        """By mesh axis and collective, of the pipeline rank that was measured; those between pipeline stages are no collectives."""
        predicted: dict[tuple[str, str], list[int]] = {}
        measured: dict[tuple[str, str], list[int]] = {}
        for message in self.estimate.messages_of(self.measurement.rank):
            if _axis(message.axis) != "pp" and (calls := int(message.calls[0])):
                _add(predicted, (_axis(message.axis), message.collective), calls * int(message.bytes_per_call[0]), calls)
        for sent in (m for m in self.measurement.messages if m.collective != "send_recv"):
            _add(measured, (_axis(sent.group), sent.collective), sent.payload_bytes, sent.count)
        for key in sorted({*predicted, *measured}):
            ours, theirs = predicted.get(key, [0, 0]), measured.get(key, [0, 0])
            name = " ".join(key)
            yield Row(name, "message", ours[0], theirs[0])
            yield Row(f"{name}, calls", "calls", ours[1], theirs[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the spec, every row, the measurement."""
        return {
            "spec": dict(self.estimate.spec),
            "exact": self.exact,
            "tolerance_bytes": self.tolerance_bytes,
            "rows": [
                {"what": r.what, "kind": r.kind, "predicted": r.predicted, "measured": r.measured}
                | {"difference": r.difference, "within": self.within(r)}
                for r in self.rows
            ],
            "measurement": asdict(self.measurement),
        }


def _axis(group: str) -> str:
    return next((name for name in ("tp", "pp") if group.startswith(name)), "dp")


def _add(total: dict[tuple[str, str], list[int]], key: tuple[str, str], size: int, count: int) -> None:
    entry = total.setdefault(key, [0, 0])
    entry[0] += size
    entry[1] += count
