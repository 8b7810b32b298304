"""The form that an engine's file fills in: what it can run, what it needs, and the trainer that takes the steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...resolve import Run
from ..settings import Settings

if TYPE_CHECKING:
    from ..mesh import Ranks
    from ..step import Trainer


def nothing_to_write(run: Run, settings: Settings) -> Mapping[str, str]:
    return {}


def nothing_to_prepare(run: Run, settings: Settings, tell: Callable[[str], None]) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Engine:
    """What runs the steps of a plan. Data, metrics, checkpoints, signals, hangs and restarts are the same around every engine.

    * `check(run, settings, on_gpu)` raises `SpecError` for what it cannot run, naming the nearest plan that it can, and `TrainwrightError` where its
      software is missing; it runs before anything is written or started;
    * `trainer(run, settings, ranks, folder)` builds this rank's trainer; `folder` is the run's (with `files` in it), None where there is none;
    * `files(run, settings)` -> {name: text}, written into the run's folder, from which the ranks read them;
    * `prepare(run, settings, tell)` does, once a machine and before its ranks start, what ranks must not do at the same time; `tell` shows a line; returns
      environment variables for the ranks.
    """

    name: str
    title: str
    check: Callable[[Run, Settings, bool], None]
    trainer: Callable[[Run, Settings, Ranks, Path | None], Trainer]
    files: Callable[[Run, Settings], Mapping[str, str]] = nothing_to_write
    prepare: Callable[[Run, Settings, Callable[[str], None]], Mapping[str, str]] = nothing_to_prepare
    frameworks: tuple[str, ...] = ()  # whose plans it runs where nobody names an engine
    aliases: tuple[str, ...] = ()
