"""The outer loop of a run on one rank: read, step, tell, save, and end when asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import SpecError
from .checkpoint import CheckpointFailed, Checkpoints
from .data.batches import Batch
from .hang import Watch
from .metrics import Metrics
from .settings import Settings
from .survive import Agreement, Losses, Stop


class Result(Protocol):
    """What a step answers; `loss` is that of the whole batch on every rank."""

    loss: float
    gradient_norm: float
    tokens: int
    rate: float
    skipped: bool
    seconds: float


class Steps(Protocol):
    """What the loop needs of a trainer: its own tensors by name, to be saved and written into, and a few numbers."""

    steps: int

    def step(self, batch: Batch) -> Any: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def expect(self) -> None: ...

    def loaded(self, progress: dict[str, Any]) -> None: ...

    def progress(self) -> dict[str, Any]: ...


class Feed(Protocol):
    """Batches with a place that can be kept."""

    @property
    def epoch(self) -> float: ...

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done`` or ``stopped`` (asked to, and saved) after `step` steps; `loss` is the last one, None where no step ran."""

    status: str
    step: int
    loss: float | None
    saved: int | None


@dataclass
class Loop:
    """`flops_per_step` model FLOPs over all ranks and `peak_flops` of all devices together give the MFU; None: not told."""

    trainer: Steps
    batches: Feed
    checkpoints: Checkpoints
    settings: Settings
    metrics: Metrics
    agreement: Agreement
    stop: Stop
    watch: Watch
    flops_per_step: float = 0.0
    peak_flops: float | None = None

    def run(self, memory: Any = None, around: Any = None) -> Outcome:
        """To the last step, or to the one after which a rank was asked to stop. Raises `Diverged`, `CheckpointFailed`.

        `memory()` is asked once, after the first step; `around(step)` is a context for each step (the profiler's).
        """
        s, first = self.settings, self.trainer.steps
        losses, last = Losses(s.spike), None
        self.watch.start(first)
        for step in range(first, s.steps):
            self.agreement.say(bool(self.stop), self.checkpoints.failed())
            last = self.trainer.step(next(self.batches))
            stop, failed = self.agreement.hear()
            self.watch.tick(step + 1)
            warned = losses.see(step + 1, last.loss, self._good())
            if warned:
                self.metrics.tell("warning", step=step + 1, message=warned)
            if failed:
                self._fail()
            if step == first and memory is not None:
                self.metrics.tell("memory", step=step + 1, **memory())
            if (step + 1) % s.log_every == 0 or step + 1 == s.steps or stop:
                self._tell(step + 1, last)
            if around is not None:
                around(step)
            due = s.save_every and (step + 1) % s.save_every == 0
            if due or stop or step + 1 == s.steps:
                self.save()
            if stop and step + 1 < s.steps:
                return self._end("stopped", step + 1, last)
        return self._end("done", max(first, s.steps), last)

    def save(self) -> None:
        """Starts a checkpoint of this step; the one before is waited for, and told."""
        self.wait()
        numbers = {"data": self.batches.state(), "progress": self.trainer.progress()}
        self.checkpoints.save(self.trainer.steps, self.trainer.state(), numbers)

    def wait(self) -> None:
        running = self.checkpoints.running is not None
        self.checkpoints.wait()
        if running:
            self.metrics.tell("checkpoint", step=self.checkpoints.last_step)

    def resume(self, which: str | None = None) -> int:
        """Loads the last whole checkpoint (or `which`), if there is one; returns the steps that are done."""
        if not which and not self.checkpoints.any():
            return 0
        self.trainer.expect()
        loaded = self.checkpoints.load(self.trainer.state(), which)
        if loaded is None:
            raise SpecError("there is no checkpoint", which or str(self.checkpoints.folder))
        for message in loaded.skipped:
            self.metrics.tell("warning", step=loaded.step, message=f"{message}; going on from step {loaded.step}")
        self.batches.load(loaded.extra["data"])
        self.trainer.loaded(loaded.extra["progress"])
        self.checkpoints.last_step = loaded.step
        self.metrics.tell("resume", step=loaded.step, checkpoint=str(loaded.folder))
        return loaded.step

    def _end(self, status: str, step: int, last: Any) -> Outcome:
        self.wait()
        self.watch.stop()
        return Outcome(status, step, None if last is None else last.loss, self.checkpoints.last_step)

    def _fail(self) -> None:
        """Some rank's background save failed; every rank's did, since they commit together."""
        self.checkpoints.wait()
        raise CheckpointFailed("a checkpoint could not be written by another rank")

    def _good(self) -> str:
        step = self.checkpoints.last_step
        return f"the checkpoint of step {step} is intact" if step is not None else "no checkpoint was written yet"

    def _tell(self, step: int, r: Result) -> None:
        rate = self.flops_per_step / r.seconds if r.seconds else 0.0
        self.metrics.tell(
            "step",
            step=step,
            loss=r.loss,
            gradient_norm=r.gradient_norm,
            rate=r.rate,
            tokens=r.tokens,
            seconds=round(r.seconds, 6),
            tokens_per_s=round(r.tokens / r.seconds, 2) if r.seconds else None,
            model_flops_per_s=round(rate),
            mfu=round(rate / self.peak_flops, 5) if self.peak_flops else None,
            epoch=round(self.batches.epoch, 4),
            skipped=r.skipped,
        )
