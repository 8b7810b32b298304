"""A run while it runs: a bar on a terminal, a line every few seconds elsewhere, from the events of its metrics."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

CONVENTION = {
    "cpu": "MFU: model FLOPs (causal attention as half) over measured matrix products",
    "cuda": "MFU: model FLOPs over the dense peak",
}
LINE_EVERY_S = 5.0
SMOOTH = 20


class RunView:
    """`see` each event; `close` at the end. Writes to `console` (standard error) only."""

    def __init__(self, console: Console, name: str, steps: int, clock: Any = time.monotonic) -> None:
        self.console, self.name, self.steps, self.clock = console, name, steps, clock
        self.times: deque[tuple[int, float]] = deque(maxlen=SMOOTH)
        self.said = -LINE_EVERY_S
        self.last: dict[str, Any] = {}
        self.bar: Progress | None = None
        self.task: Any = None

    def see(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "start":
                self._start(event)
            case "step":
                self._step(event)
            case "memory":
                self.console.print(memory_line(event))
            case "warning":
                self.console.print(f"warning: {event.get('message')}", style="yellow")
            case "resume":
                self.console.print(f"going on from step {event['step']} ({event.get('checkpoint')})")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _start(self, event: dict[str, Any]) -> None:
        self.times.clear()
        self.steps = int(event.get("steps", self.steps))
        if event.get("attempt", 0):
            self.console.print(f"started again (restart {event['attempt']}) at step {event['step']}")
        else:
            convention = CONVENTION.get(str(event.get("device")), CONVENTION["cuda"])
            self.console.print(f"{self.name}: {event.get('ranks')} ranks on {event.get('device')}, {self.steps} steps. {convention}")
        if self.console.is_terminal and self.bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=self.steps)
            self.bar.start()

    def _step(self, event: dict[str, Any]) -> None:
        now = self.clock()
        self.last = event
        self.times.append((int(event["step"]), now))
        text = step_line(event, self.remaining())
        if self.bar is not None:
            self.bar.update(self.task, completed=event["step"], description=text)
        elif now - self.said >= LINE_EVERY_S or event["step"] == self.steps:
            self.said = now
            self.console.print(f"step {event['step']}/{self.steps}  {text}", soft_wrap=True)

    def remaining(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None before there is a pace."""
        if len(self.times) < 2 or self.times[-1][0] <= self.times[0][0]:
            return None
        (a, start), (b, end) = self.times[0], self.times[-1]
        return (self.steps - b) * (end - start) / (b - a)


def step_line(event: dict[str, Any], eta_s: float | None) -> str:
    mfu, speed = event.get("mfu"), event.get("tokens_per_s") or 0
    parts = [f"loss {number(event.get('loss'))}", f"{speed:,.0f} tokens/s"]
    if mfu:
        parts.append(f"MFU {mfu:.1%}")
    parts.append(f"norm {number(event.get('gradient_norm'))}")
    if eta_s is not None:
        parts.append(f"ETA {format_seconds(eta_s)}")
    return "  ".join(parts)


def number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else str(value)


def memory_line(event: dict[str, Any]) -> str:
    words = {"master_weights": "fp32 masters", "peak_allocated": "peak allocated", "resident": "resident (the process)"}
    kinds = [f"{words.get(k, k)} {format_bytes(v)}" for k, v in event.items() if k not in ("event", "time", "step")]
    return f"memory of rank 0: {', '.join(kinds)}"
