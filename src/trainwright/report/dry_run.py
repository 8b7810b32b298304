"""What one rank of a plan would hold: built on fake tensors, beside the estimate."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..units import format_bytes

if TYPE_CHECKING:
    from ..cost.estimate import Estimate
    from ..train.dry import DryRun

OWNED = ("parameters", "gradients", "optimizer")


def dry_run_dict(found: DryRun, estimate: Estimate) -> dict[str, Any]:
    """{"built": ..., "predicted": ...} in bytes; `peak_bytes` is live tensors, without the framework's own memory."""
    return {"built": asdict(found), "predicted": predicted(estimate), "framework_bytes": framework(estimate)}


def predicted(estimate: Estimate) -> dict[str, int]:
    states, i = estimate.table.memory.states, estimate.index
    masters = int(states["master_weights"][i])
    owned = {k: int(states[k][i]) + (masters if k == "optimizer" else 0) for k in OWNED}
    return owned | {"peak_bytes": estimate.peak_bytes - framework(estimate)}


def framework(estimate: Estimate) -> int:
    return int(estimate.table.memory.breakdown["framework"][estimate.index])


def dry_run_text(console: Console, found: DryRun, estimate: Estimate) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("Built", "Predicted", ""):
        table.add_column(name, justify="right")
    here, there = asdict(found), predicted(estimate)
    for key, what in (*((k, k) for k in OWNED), ("peak_bytes", "peak of live tensors")):
        off = there[key] / here[key] - 1 if here[key] else 0.0
        table.add_row(what, format_bytes(here[key]), format_bytes(there[key]), "equal" if here[key] == there[key] else f"{off:+.2%}")
    console.print(f"{estimate.model.name}: rank {found.rank} of {found.ranks:,}, built and stepped on fake tensors", markup=False)
    console.print(table)
    fits = f"on a GPU add {format_bytes(framework(estimate))} of CUDA context and workspaces; the card has {format_bytes(estimate.capacity_bytes)}"
    console.print(f"{fits}. {found.software}, {found.seconds:.1f} s.", markup=False)
