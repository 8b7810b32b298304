"""Plan -> the files that an engine, a launcher or a scheduler reads, and back.

Every module of this folder with a ``TARGET`` is a target; `emit` writes the whole set of one. Adding a target is adding a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..registry import Registry
from ..resolve import Run
from .base import Changes, Files, Options, Target

TARGETS = Registry("trainwright.emit", "TARGET", "target")


def emit(run: Run, target: str, options: Options | None = None, chosen: Changes | None = None) -> Files:
    """{file name: text} of the target, README.md among them, which names the fields of `chosen`: those that were open and that the target decided.

    Raises `SpecError` where the target cannot express the plan: it names the field and the nearest plan that it can.
    """
    from .nearest import refuse
    from .readme import readme

    writer: Target = TARGETS.get_or_raise(target, "--to")
    options = options or Options()
    run = settled(run, writer)
    refuse(run, writer)
    return {**writer.write(run, options), "README.md": readme(run, writer, options, chosen or {})}


def suited(run: Run, target: str) -> tuple[Run, Changes]:
    """The run with what its spec leaves open as the target needs it, and those fields."""
    from .nearest import suited as nearest

    return nearest(run, TARGETS.get_or_raise(target, "--to"))


def settled(run: Run, target: Target) -> Run:
    """The run with the sizes that the target's writer works out among the framework's options, so that what is expected is expected of them."""
    from .fields import engine_of

    engine = engine_of(target, run)
    worked_out = {**(engine.settle(run) if engine else {}), **target.settle(run)}
    if not worked_out:
        return run
    structure = run.plan.structure
    joined = tuple(sorted({**worked_out, **dict(structure.options)}.items()))
    return replace(run, plan=replace(run.plan, structure=replace(structure, options=joined)))


def read(files: Mapping[str, str]) -> tuple[Target, dict[str, Any]] | None:
    """(target, the part of a run spec that the files say), None where no target knows them."""
    for target in TARGETS.values():
        found = target.read(files)
        if found is not None:
            return target, found
    return None


__all__ = ["TARGETS", "Files", "Options", "Target", "emit", "read", "settled", "suited"]
