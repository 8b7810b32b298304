"""Answers for a terminal: tables, bars, sentences. Works without color, in 60 columns, and piped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cost.memory_table import PHASES
from ..units import format_bytes, format_count, format_seconds, format_usd
from .rows import plan_row

if TYPE_CHECKING:
    from ..api import Plans
    from ..cost.estimate import Estimate

NARROW = 100
FILLS = "█▓▒░▚▞▙▜"
COLORS = ("blue", "cyan", "magenta", "yellow", "green", "red", "white", "bright_black")
ALWAYS = ("TP", "PP", "DP", "MBS", "Tokens/s/GPU", "Step s", "GiB")  # shown even where every plan says the same
TRIVIAL = tuple((c, 1) for c in ("CP", "VP", "EP"))
DROP_WHEN_NARROW = ("GPUs", "GBS", "Seq", "VP", "CP", "Schedule", "Offload", "TFLOP/s/GPU", "USD")
SHORT = {"Tokens/s/GPU": "tok/s/GPU", "TFLOP/s/GPU": "TFLOP/s", "Recompute": "Recomp."}


def headline(e: Estimate) -> str:
    m, c = e.model, e.cluster
    active = "" if m.parameters == m.active_parameters else f", {format_count(m.active_parameters)} active"
    gbps = c.network_bytes_per_s * 8 / 1e9
    return (
        f"{m.name} ({m.parameters:,} parameters{active}) on {c.gpus} x {c.gpu.id}: {c.nodes} node{'s' * (c.nodes > 1)} x {c.gpus_per_node}, "
        f"{c.gpu.link or 'PCIe'} {c.gpu.link_bytes_per_s / 1e9:.0f} GB/s, network {gbps:.0f} Gb/s (per GPU and direction)"
    )


def plans_text(console: Console, plans: Plans, explain: bool = False) -> None:
    """The ranked table, then the first plan explained; where nothing fits, what would."""
    said(console, "assumed", plans.assumed)
    said(console, "warning", plans.warnings)
    removed = ", ".join(f"{n:,} {rule}" for rule, n in sorted(plans.removed.items(), key=lambda kv: -kv[1]) if n)
    if not len(plans):
        console.print(f"Nothing fits: {plans.searched:,} layouts were considered. Removed: {removed or 'none'}.")
        if plans.suggestion:
            console.print(f"The cheapest change that fits: {plans.suggestion}")
        return
    best = plans[0]
    console.print(headline(best))
    console.print(f"{plans.searched:,} layouts considered; removed: {removed or 'none'}.")
    ranking_table(plans, console)
    console.print("[b]The first plan[/b]" if console.is_terminal else "The first plan")
    for reason in best.reasons:
        console.print(f"  - {reason}", markup=False)
    estimate_text(console, best, explain=explain, head=False)


def ranking_table(estimates: Iterable[Estimate], console: Console) -> None:
    """The plans as a table; what all of them share stands in one line above it, so that the rest fits the terminal."""
    rows = [plan_row(e) for e in estimates]
    shared = {c: rows[0][c] for c in rows[0] if len({str(r[c]) for r in rows}) == 1 and c not in ALWAYS} if len(rows) > 1 else {}
    columns = [c for c in rows[0] if c not in shared and not (console.width < NARROW and c in DROP_WHEN_NARROW)]
    if shared:
        alike = ", ".join(f"{c} {_cell(v)}" for c, v in shared.items() if v not in (None, "-", "none") and (c, v) not in TRIVIAL)
        console.print(f"All of them: {alike}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    for c in columns:
        table.add_column(SHORT.get(c, c), justify="left" if isinstance(rows[0][c], str) else "right", no_wrap=True)
    for n, r in enumerate(rows, 1):
        table.add_row(str(n), *[_cell(r[c]) for c in columns])
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def estimate_text(console: Console, e: Estimate, explain: bool = False, head: bool = True) -> None:
    """One estimate, whole: verdict, memory, time, traffic, throughput, the run."""
    if head:
        console.print(headline(e))
        said(console, "assumed", e.assumed)
        said(console, "warning", e.warnings)
    memory_text(console, e, explain=explain, head=False)
    time_text(console, e, explain)
    traffic = traffic_table(e)
    if traffic.row_count:
        console.print(traffic)
    run_text(console, e)


def levers_table(e: Estimate) -> Table:
    """What each lever, pulled alone, would change."""
    from ..search.levers import levers

    table = Table(title="one change at a time", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("change", "memory", "against now", "tokens/s", "verdict"):
        table.add_column(name, justify="left" if name in ("change", "verdict") else "right")
    for lever in levers(e):
        sign = "+" if lever.delta_bytes >= 0 else "-"
        delta = f"{sign}{format_bytes(abs(lever.delta_bytes))}"
        table.add_row(
            lever.name, format_bytes(lever.device_bytes), delta, f"{lever.speed - 1:+.1%}", "fits" if lever.fits else "does not fit"
        )
    return table


def memory_text(console: Console, e: Estimate, explain: bool = False, head: bool = True) -> None:
    """Verdict, the bar of the peak, the phases; with `explain` every term."""
    if head:
        console.print(headline(e))
        said(console, "assumed", e.assumed)
        said(console, "warning", e.warnings)
    m = e.memory_dict()
    words = {"fits": "Fits", "tight": "Fits, but only inside the margin", "no": "Does not fit"}[m["verdict"]]
    console.print(
        f"\n{words}: {format_bytes(e.needed_bytes)} of {format_bytes(e.capacity_bytes)} on the fullest GPU (pipeline rank {m['pipeline_rank']}). "
        f"Allocated {format_bytes(m['peak_bytes'] - m['breakdown']['framework'])}, reserved {format_bytes(m['reserved_bytes'])}, "
        f"on the device {format_bytes(m['device_bytes'])}. Peak in {m['peak_phase']}"
        + (f", at {moment}." if (moment := m["peak_moment"].removeprefix(f"{m['peak_phase']}: ")) else ".")
    )
    bar(console, "memory at the peak", m["breakdown"], max(e.capacity_bytes, m["peak_bytes"]), format_bytes)
    console.print("by phase (tensors): " + ", ".join(f"{p} {format_bytes(m['phases'][p])}" for p in PHASES))
    host, nvme = m["host_bytes_per_node"], m["nvme_bytes_per_node"]
    if host or nvme:
        by_phase = ", ".join(f"{name} {format_bytes(value)}" for name, value in m["host_phases"].items())
        console.print(f"host memory a node {format_bytes(host)}: {by_phase}" + (f"; NVMe a node {format_bytes(nvme)}" if nvme else ""))
    if explain:
        rows = [(t.name, t.formula, t.numbers, format_bytes(t.bytes), t.source) for t in e.table.memory.terms(e.index)]
        console.print(terms_table("memory, term by term", rows))


def time_text(console: Console, e: Estimate, explain: bool = False) -> None:
    low, high = float(e.table.time.low_s[e.index]), float(e.table.time.high_s[e.index])
    breakdown = {k: float(c[e.index]) for k, c in e.table.time.breakdown.items()}
    console.print(
        f"\nStep {format_seconds(e.step_s)} (80 % interval {format_seconds(low)} to {format_seconds(high)}); exposed seconds by part:"
    )
    bar(console, "step time", breakdown, e.step_s, format_seconds)
    if explain:
        rows = [(t.name, t.formula, _numbers(t.numbers), format_seconds(t.seconds), t.source) for t in e.table.time.terms(e.index)]
        console.print(terms_table("time, term by term", rows))


def _numbers(numbers: Mapping[str, float] | str) -> str:
    return numbers if isinstance(numbers, str) else ", ".join(f"{k} {_plain(v)}" for k, v in numbers.items())


def _plain(value: float) -> str:
    """Four digits without an exponent, up to where only one is readable."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def traffic_table(e: Estimate) -> Table:
    table = Table(title="communication of a step (payload per rank)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("axis", "ranks", "collective", "what", "calls", "payload", "seconds", "exposed"):
        table.add_column(name, justify="left" if name in ("axis", "collective", "what") else "right", overflow="fold")
    for c in e.communication():
        cells = (c["group"], f"{c['ranks']:,}", c["collective"], c["what"], f"{c['count']:,}", format_bytes(c["bytes_per_rank"]))
        table.add_row(*cells, format_seconds(c["seconds"]), format_seconds(c["exposed_s"]))
    return table


def run_text(console: Console, e: Estimate) -> None:
    rate = e.tokens_per_s
    console.print(
        f"Throughput {rate:,.0f} tokens/s, {rate / e.plan.gpus:,.0f} per GPU; {e.flops['model'] / e.step_s / e.plan.gpus / 1e12:,.0f} TFLOP/s per GPU. "
        f"MFU {e.mfu:.1%}, HFU {e.hfu:.1%} (model FLOPs with causal attention as half of the square, over the dense {e.job.precision} peak; "
        "HFU adds recomputation)."
    )
    c = e.cost
    if c.days is not None:
        money = "" if c.usd is None else f", {format_usd(c.usd)} ({c.price_source})"
        energy = "" if c.energy_mwh is None else f", {_plain(c.energy_mwh)} MWh"
        console.print(f"The run: {c.days:,.1f} days, {c.gpu_hours:,.0f} GPU-hours{money}{energy}, goodput {c.goodput:.1%}.")


def bar(console: Console, title: str, parts: Mapping[str, float], total: float, show: object) -> None:
    """Parts of a total as one bar and a legend; told apart by fill and letter, not by color alone."""
    width = max(20, min(console.width - 2, 110))
    shown = [(k, v) for k, v in parts.items() if v > 1e-6 * total]  # what is less is rounding
    fills = {k: n for n, k in enumerate(parts if len(parts) <= len(FILLS) else dict(shown))}  # the same part looks the same in every answer
    line, legend = Text(), Text()
    used = 0
    for name, value in shown:
        fill, style = FILLS[fills[name] % len(FILLS)], COLORS[fills[name] % len(COLORS)]
        cells = round(width * value / total) if total else 0
        cells = max(0, min(cells, width - used))
        line.append(fill * cells, style=style)
        used += cells
        if legend:
            legend.append("  ")
        legend.append(fill, style=style)
        legend.append(f" {name.replace('_', ' ')} {show(value)} ({value / total:.0%})" if total else name)  # type: ignore[operator]
    line.append("·" * (width - used), style="dim")
    console.print(line)
    console.print(legend)


def terms_table(title: str, rows: Sequence[tuple[str, str, str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("term", "formula", "numbers", "value", "source"):
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(c) for c in row])
    return table


def said(console: Console, what: str, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(f"{what}: {line}", markup=False)
