"""The lesson on distributed training: its five functions, its tables, every demonstration in its order, and its five exercises.

`run` performs all of it. Where the lesson errs, a line says so, with the right figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .functions import (
    memory_calculator,
    mixed_precision_comparison,
    simulate_data_parallelism,
    simulate_pipeline_parallelism,
    simulate_tensor_parallelism,
)
from .tables import tables

if TYPE_CHECKING:
    from ..simulate.report import Report
    from .exercises import Planner

__all__ = [
    "memory_calculator",
    "mixed_precision_comparison",
    "parts",
    "run",
    "simulate_data_parallelism",
    "simulate_pipeline_parallelism",
    "simulate_tensor_parallelism",
    "tables",
]


def parts(planner: Planner | None = None) -> dict[str, Callable[[], Report]]:
    """The lesson's demonstrations and exercises by name, in its order, each performed when it is called. `planner`: the library's `estimate`."""
    from .demonstrations import DEMONSTRATIONS
    from .exercises import exercises

    return {**DEMONSTRATIONS, **exercises(planner)}


def run(planner: Planner | None = None, show: Callable[[Report], None] | None = None) -> list[Report]:
    """Performs the whole lesson; every report is handed to `show` (left out: printed as plain text), and all are returned."""
    done = []
    for perform in parts(planner).values():
        report = perform()
        (show or _print)(report)
        done.append(report)
    return done


def _print(report: Report) -> None:
    print(report.text())
