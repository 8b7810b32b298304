"""Engines: what runs the steps of a plan. Every module of this folder with an ``ENGINE`` is one; adding an engine is adding a file."""

from __future__ import annotations

from ...registry import Registry
from ...resolve import Run
from ..settings import Settings
from .base import Engine

ENGINES = Registry("trainwright.train.engines", "ENGINE", "engine")
NATIVE = "native"


def engine_of(run: Run, settings: Settings) -> Engine:
    """The engine that was named, else the one that the plan's framework names, else PyTorch's own wrappers. Raises `SpecError` for an unknown name."""
    if settings.engine:
        named: Engine = ENGINES.get_or_raise(settings.engine, "--engine")
        return named
    framework = run.plan.structure.framework
    by_framework = {f: e for e in ENGINES.values() for f in e.frameworks}
    found: Engine = by_framework.get(framework, ENGINES[NATIVE])
    return found


__all__ = ["ENGINES", "NATIVE", "Engine", "engine_of"]
