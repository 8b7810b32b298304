"""What a run survives: a signal, a dead parent, a loss that is no number or jumps. (Kills and damage are `checkpoint`'s matter, hangs are `hang`'s.)"""

from __future__ import annotations

import math
import signal
from collections import deque
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..errors import TrainwrightError
from .files import STOP_FILE

WINDOW = 20


class Diverged(TrainwrightError):
    """The loss is no number, or has jumped; training on would only overwrite good checkpoints."""


class Stop:
    """Whether the run was asked to end early: by SIGTERM (Slurm's preemption), by SIGINT or by a file named ``stop`` in the run's folder, which reaches every
    node that shares it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / STOP_FILE
        self.signalled = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True

    def __bool__(self) -> bool:
        return self.signalled or self.file.exists()


class Agreement:
    """One word a step that all ranks agree on: the largest of what each said. It travels while the step computes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.words = torch.zeros(2, dtype=torch.int32)
        self.work: dist.Work | None = None

    def say(self, stop: bool, failed: bool) -> None:
        self.words = torch.tensor([int(stop), int(failed)], dtype=torch.int32)
        if self.group is not None:
            self.work = dist.all_reduce(self.words, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def hear(self) -> tuple[bool, bool]:
        """(stop, failed) of any rank."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return bool(self.words[0]), bool(self.words[1])


class Losses:
    """Watches the losses of a run. `factor` 0: jumps are told, never a reason to end."""

    def __init__(self, factor: float = 0.0) -> None:
        self.factor = factor
        self.last: deque[float] = deque(maxlen=WINDOW)

    def see(self, step: int, loss: float, good: str) -> str | None:
        """A warning where the loss jumps. Raises `Diverged` where it is no number, or above `factor` x the mean of the last 20; `good` says what is left."""
        if not math.isfinite(loss):
            raise Diverged(
                f"step {step}: the loss is {loss}; {good}. A lower learning rate, longer warm-up or bf16 instead of fp16 may help"
            )
        told = None
        if len(self.last) == WINDOW:
            mean = sum(self.last) / WINDOW
            spread = (sum((x - mean) ** 2 for x in self.last) / WINDOW) ** 0.5
            if self.factor and loss > self.factor * mean:
                raise Diverged(
                    f"step {step}: the loss jumped to {loss:.4g}, {loss / mean:.3g} x the mean of the last {WINDOW} ({mean:.4g}); {good}"
                )
            if loss > mean + max(8 * spread, 0.2 * mean):
                told = f"step {step}: the loss jumped to {loss:.4g}; the last {WINDOW} had {mean:.4g} +- {spread:.2g}"
        self.last.append(loss)
        return told
