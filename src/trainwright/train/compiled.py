"""``torch.compile`` of each block: the forward of a layer, under the wrappers that recompute, shard and gather around it, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import SpecError, nearest
from ..resolve import Run
from ..schedules import SCHEDULES
from .device import Machine
from .settings import Settings

OFF, AUTO = "off", "auto"


def backend_of(run: Run, settings: Settings, machine: Machine) -> str | None:
    """The compiler's name; None: blocks run as they are. `auto` is inductor where the plan says ``compile`` and there is a GPU: on a CPU compiling takes longer
    than it saves in a short run, so that it must be asked for by name.

    Raises `SpecError` for an unknown backend and for layouts whose blocks cannot be compiled here.
    """
    wanted = settings.compile
    if wanted == AUTO:
        wanted = "inductor" if run.plan.structure.compile and machine.kind == "cuda" else OFF
    if wanted == OFF:
        return None
    known = [AUTO, OFF, *torch.compiler.list_backends(exclude_tags=())]
    if wanted not in known:
        raise SpecError(f"no compiler {wanted[:40]!r}", "compile", nearest(wanted, known) or known)
    _check(run)
    return wanted


def notes(run: Run, settings: Settings, backend: str | None) -> list[str]:
    """What a person is told who planned to compile and does not."""
    left_out = run.plan.structure.compile and backend is None and settings.compile == AUTO
    return ["the plan's compile is left out on a CPU; --compile inductor asks for it"] if left_out else []


def _check(run: Run) -> None:
    plan, s = run.plan, run.plan.structure
    for axis in ("tp", "cp", "ep"):
        if getattr(plan, axis) > 1:
            raise SpecError("compiled blocks run here in data and pipeline parallelism", f"strategy.{axis}", [1])
    if s.recompute == "selective":
        raise SpecError(
            "selective recomputation looks at operations that a compiled block no longer has", "strategy.recompute", ["full", "none"]
        )
    if plan.pp > 1:
        table = SCHEDULES.get_or_raise(s.schedule, "strategy.schedule").table(plan.pp, plan.accumulation, plan.virtual_stages)
        if any(a.kind in ("I", "W") for actions in table.lists for a in actions):
            raise SpecError("a schedule that makes weight gradients later cannot run compiled blocks", "strategy.schedule", ["1f1b"])


def compile_blocks(blocks: Iterable[nn.Module], backend: str) -> None:
    """Each block's forward, not its call, so that hooks around it are not traced."""
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
