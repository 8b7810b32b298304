"""Predicted beside measured for a terminal: one table and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from .text import headline

if TYPE_CHECKING:
    from ..measure.real import RealRow, RealVerification
    from ..measure.verify import Verification

UNITS = {"memory": "bytes", "message": "bytes a step", "calls": "a step", "rank": ""}


def verification_text(console: Console, found: Verification) -> None:
    """The headline, a row for each number, the verdict with its software and rank."""
    m, plan = found.measurement, found.estimate.plan
    console.print(headline(found.estimate), markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("Predicted", "Measured", "Difference"):
        table.add_column(name, justify="right")
    table.add_column("Unit")
    table.add_column("Within")
    for row in found.rows:
        numbers = (f"{row.predicted:,}", f"{row.measured:,}", f"{row.difference:+,}" if row.difference else "0")
        table.add_row(row.what, *numbers, UNITS[row.kind], "yes" if found.within(row) else "no")
    console.print(table)
    off = [r for r in found.rows if not found.within(r)]
    slack = f"{found.tolerance_bytes:,} bytes"
    verdict = f"{len(off)} of {len(found.rows)} rows differ by more than {slack}" if off else f"All {len(found.rows)} rows agree to {slack}"
    rank = f"pipeline rank {m.rank} of {plan.pp}" if plan.pp > 1 else f"rank 0 of {plan.gpus}"
    console.print(f"{verdict}. Measured: {rank}, second step, {m.software}, {m.seconds:.1f} s.", markup=False)


def real_text(console: Console, found: RealVerification) -> None:
    """A row for each number of a real run, then the step times in a sentence, and what this machine could not run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("Predicted", "Measured", "Error"):
        table.add_column(name, justify="right")
    table.add_column("Unit")
    table.add_column("Within")
    for row in found.rows:
        table.add_row(row.what, *_real_numbers(row), row.unit, "yes" if row.within else "no")
    console.print(table)
    s = found.summary
    if s:
        correlation = f", rank correlation {s['rank_correlation']:.3f}" if "rank_correlation" in s else ""
        console.print(
            f"Step time over {s['layouts']:.0f} layouts: mean error {s['mean_error']:.1%}, largest {s['largest_error']:.1%}{correlation}: "
            f"{'within' if found.times_within else 'outside of'} the tolerance (15 %, 0.9).",
            markup=False,
        )
    if s and s.get("pace", 1.0) != 1.0:
        console.print(
            f"The same work takes this machine {s['pace']:.2f} times as long as when it was calibrated; so do the predicted steps.",
            markup=False,
        )
    for line in found.skipped:
        console.print(f"Not run: {line}", markup=False)
    console.print(found.machine, markup=False)


def _real_numbers(row: RealRow) -> tuple[str, str, str]:
    whole = row.unit in ("bytes", "calls")
    text = lambda x: "" if x is None else f"{x:,.0f}" if whole else f"{x:.6g}"  # noqa: E731
    if row.error is None:
        return text(row.predicted), text(row.measured), ""
    relative = row.unit in ("s", "of the peak") or (whole and not isinstance(row.error, int))
    return text(row.predicted), text(row.measured), f"{row.error:+.1%}" if relative else f"{row.error:+,.3g}"
