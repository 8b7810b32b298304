"""The picture of a replayed schedule as SVG: ranks by time, every action colored, patterned and numbered, what stands idle, the critical path, and the
activations held below, on one time axis. Several schedules are drawn under each other on the same scale.

Readable without color: F is plain, B and I are hatched, W is dotted. Too many actions for their numbers are drawn as shares of busy time by kind instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from ..schedules.actions import KINDS
from ..schedules.timeline import Timeline

SOLID = {"F": "#bcd3e8", "B": "#cf7f2d", "I": "#e5b06c", "W": "#3f7f4d"}  # where blocks are too thin for a pattern
FILL = {"F": "#dbe9f6", "B": "#f3bd84", "I": "#fae0c0", "W": "#93c79b", "G": "#cfcfcf"}
INK = {"F": "#8fb3d4", "B": "#b4691f", "I": "#cf9350", "W": "#2f7a3f", "G": "#777777"}
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "G": "gather / reduce"}
LEFT, RIGHT, TOP, GAP = 74, 24, 16, 34
MAX_NUMBERED = 12_000
MAX_BLOCKS = 120_000
MIN_BLOCK = 2.2
BINS = 480
CHUNK_LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Layout:
    """Where things are, in pixels: `scale` pixels per unit of time, `row` the height of a rank. `detail` is how much is drawn of an action: numbered
    (and explained on hovering), a plain block, or its share in the work of a slice of time."""

    width: float
    scale: float
    row: float
    detail: Literal["numbered", "block", "share"]

    def x(self, time: float | np.ndarray) -> float | np.ndarray:
        return LEFT + np.asarray(time) * self.scale


def layout_of(timelines: Sequence[Timeline], width: float | None = None) -> Layout:
    """One scale for all; wide enough that an ordinary action holds its number, if that is not absurdly wide."""
    longest = max(t.makespan for t in timelines)
    ordinary = float(np.median(np.concatenate([t.busy[t.busy > 0] for t in timelines])))
    wanted = max(longest / _small(t) * (5.6 * (len(str(t.microbatches - 1)) + (t.virtual_stages > 1)) + 3) for t in timelines)
    plot = (width or min(max(wanted + LEFT + RIGHT, 900), 2600)) - LEFT - RIGHT
    scale = plot / longest
    blocks = sum(len(t.nodes) for t in timelines)
    ranks = max(t.stages for t in timelines)
    row = 26.0 if ranks <= 8 else 20.0 if ranks <= 16 else 15.0 if ranks <= 32 else 13.0
    detail: Literal["numbered", "block", "share"] = "numbered" if blocks <= MAX_NUMBERED else "block"
    if blocks > MAX_BLOCKS or ordinary * scale < MIN_BLOCK:
        detail = "share"
    return Layout(plot + LEFT + RIGHT, scale, row, detail)


def _small(t: Timeline) -> float:
    """The time of a short action: one in five is shorter."""
    return float(np.quantile(t.busy[t.busy > 0], 0.2))


def to_svg(timelines: Timeline | Sequence[Timeline], titles: Sequence[str] = (), width: float | None = None) -> str:
    """A self-contained SVG document; every block and every gap says on hovering what it is. `titles` name the schedules (default: name and size)."""
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    layout = layout_of(shown, width)
    parts: list[str] = []
    y = float(TOP)
    for n, timeline in enumerate(shown):
        title = titles[n] if n < len(titles) else title_of(timeline)
        y = _panel(parts, timeline, layout, y, title, prefix=f"p{n}") + GAP
    y = _legend(parts, shown, layout, y)
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#111}.n{text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:.22em;stroke-opacity:.85}"
        ".t{font-size:15px;font-weight:bold}.s{font-size:12px}.l{font-size:11px;text-anchor:end}.k{font-size:11px}.b{stroke:#555;stroke-width:.5px}"
        ".c{stroke:#000;stroke-width:2.2px}.g:hover rect{stroke:#d0021b;stroke-width:2px}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width:.0f}" height="{y:.0f}" viewBox="0 0 {layout.width:.0f} {y:.0f}">'
        f'<style>{style}</style><defs>{"".join(_patterns(max(t.virtual_stages for t in shown)))}</defs><rect width="100%" height="100%" fill="#fff"/>'
    )
    return head + "".join(parts) + "</svg>\n"


def title_of(t: Timeline) -> str:
    chunks = f", {t.virtual_stages} chunks a rank" if t.virtual_stages > 1 else ""
    return f"{t.name}: {t.stages} ranks{chunks}, {t.microbatches} microbatches"


def summary_of(t: Timeline) -> str:
    copies = f", {t.weight_copies} copies of the weights" if t.weight_copies > 1 else ""
    return (
        f"makespan {t.makespan:.6g}; bubble {t.bubble_total:.1%} of all time (idle/total), {t.bubble_useful:.1%} of the work (idle/useful), "
        f"span {t.bubble_span:.1%}; peak {max(t.peak_per_rank):.4g} microbatches' activations{copies}"
    )


def _patterns(chunks: int) -> list[str]:
    """Fills by kind and chunk: later chunks are darker; B and I are hatched, W is dotted."""
    out = []
    for kind, fill in FILL.items():
        for chunk in range(min(max(chunks, 2), 8)):
            color, ink = shade(fill, 0.88**chunk), INK[kind]
            mark = {
                "B": f'<path d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2" stroke="{ink}" stroke-width="1"/>',
                "I": f'<path d="M0,3 h6" stroke="{ink}" stroke-width=".9"/>',
                "W": f'<circle cx="1.5" cy="1.5" r="1" fill="{ink}"/><circle cx="4.5" cy="4.5" r="1" fill="{ink}"/>',
                "G": f'<path d="M3,0 v6" stroke="{ink}" stroke-width="1"/>',
            }.get(kind, "")
            body = f'<rect width="6" height="6" fill="{color}"/>{mark}'
            out.append(f'<pattern id="{kind}{chunk}" width="6" height="6" patternUnits="userSpaceOnUse">{body}</pattern>')
    return out


def shade(color: str, factor: float) -> str:
    """A hexadecimal color, darker by `factor`."""
    return "#" + "".join(f"{int(int(color[i : i + 2], 16) * factor):02x}" for i in (1, 3, 5))


def _panel(parts: list[str], t: Timeline, layout: Layout, y: float, title: str, prefix: str) -> float:
    """One schedule: heading, lanes, axis, memory. Returns the y below it."""
    parts.append(
        f'<text class="t" x="{LEFT}" y="{y + 12:.0f}">{escape(title)}</text><text class="s" x="{LEFT}" y="{y + 29:.0f}">{escape(summary_of(t))}</text>'
    )
    y += 40
    end = float(layout.x(t.makespan))
    size = min(11.0, layout.row - 2.5)
    for rank in range(t.stages):
        top = y + rank * layout.row
        parts.append(f'<rect x="{LEFT}" y="{top + 1:.1f}" width="{end - LEFT:.1f}" height="{layout.row - 2:.1f}" fill="#f4f4f4"/>')
        parts.append(
            f'<text class="l" style="font-size:{size}px" x="{LEFT - 6}" y="{top + layout.row / 2 + size * 0.36:.1f}">rank {rank}</text>'
        )
    {"numbered": _numbered, "block": _plain, "share": _shares}[layout.detail](parts, t, layout, y, prefix)
    _collectives(parts, t, layout, y)
    y = _axis(parts, t, layout, y + t.stages * layout.row)
    return _memory(parts, t, layout, y + 8)


def _numbered(parts: list[str], t: Timeline, layout: Layout, y: float, prefix: str) -> None:
    """Every action, every gap, and the critical path as a heavy outline."""
    table, row, critical = t.table, layout.row, set(t.critical_path)
    for gap in t.gaps:
        x0, x1 = float(layout.x(gap.start)), float(layout.x(gap.end))
        why = f"rank {gap.rank} idle {gap.end - gap.start:.6g} ({gap.phase})" + (
            f", waits for {t.label(gap.waits_for)}" if gap.waits_for >= 0 else ""
        )
        place = f'x="{x0:.2f}" y="{y + gap.rank * row + 1:.1f}" width="{x1 - x0:.2f}" height="{row - 2:.1f}"'
        parts.append(f'<g class="g"><rect {place} fill="#f4f4f4"/><title>{escape(why)}</title></g>')
    late: list[str] = []
    second = set(t.nodes.second[t.nodes.second >= 0].tolist())
    stage, rank, kind, microbatch, fused = (c.tolist() for c in (table.stage, table.rank, table.kind, table.microbatch, table.fused))
    needs = _producers(t)
    for i, (start, end) in enumerate(zip(t.row_start.tolist(), t.row_end.tolist())):
        if end <= start:
            continue
        half = fused[i] or i in second
        height = (row - 2) / 2 if half else row - 2
        top = y + rank[i] * row + 1 + (height if i in second else 0)
        x0, x1 = float(layout.x(start)), float(layout.x(end))
        letter, chunk = KINDS[kind[i]], min(stage[i] // t.stages, 7)
        on_path = i in critical or (i in second and i - 1 in critical)
        text = _number(t, microbatch[i], stage[i], x1 - x0, height)
        label = (
            f'<text class="n" style="font-size:{text[1]:.3g}px" x="{(x0 + x1) / 2:.2f}" y="{top + height / 2 + text[1] * 0.36:.2f}">{text[0]}</text>'
            if text
            else ""
        )
        tip = f"{WORDS[letter]} of microbatch {microbatch[i]} on stage {stage[i]} (rank {rank[i]}): {start:.6g} to {end:.6g}" + (
            ", on the critical path" if on_path else ""
        )
        block = (
            f'<g class="g" id="{prefix}r{i}"{needs(i, prefix)}><rect class="b{" c" if on_path else ""}" x="{x0:.2f}" y="{top:.1f}" '
            f'width="{max(x1 - x0, 0.3):.2f}" '
            f'height="{height:.1f}" fill="url(#{letter}{chunk})"/>{label}<title>{tip}</title></g>'
        )
        (late if on_path else parts).append(block)
    parts += late


def _producers(t: Timeline) -> Callable[[int, str], str]:
    """A function row, prefix -> the attribute that names the blocks it waited for."""
    n, node_rows = len(t.nodes), t.nodes.row.tolist()
    needs, row_node = t.nodes.needs.tolist(), t.nodes.row_node.tolist()

    def attribute(row: int, prefix: str) -> str:
        rows = [f"{prefix}r{node_rows[x]}" for x in needs[row_node[row]] if x < n]
        return f' data-n="{" ".join(rows)}"' if rows else ""

    return attribute


def _number(t: Timeline, microbatch: int, stage: int, width: float, height: float) -> tuple[str, float] | None:
    """The label that fits a block, and its size: the microbatch and, with several chunks, the chunk's letter."""
    letter = CHUNK_LETTERS[stage // t.stages] if t.virtual_stages > 1 and stage // t.stages < len(CHUNK_LETTERS) else ""
    for text in dict.fromkeys((f"{microbatch}{letter}", str(microbatch))):
        size = min(11.0, height - 2.0, (width - 1.5) / (0.6 * len(text)))
        if size >= 7.0:
            return text, size
    return None


def _plain(parts: list[str], t: Timeline, layout: Layout, y: float, prefix: str) -> None:
    """Every action as a block without number: one path a rank and kind."""
    height = layout.row - 2
    second = np.zeros(len(t.table), bool)
    second[t.nodes.second[t.nodes.second >= 0]] = True
    x0, x1 = np.asarray(layout.x(t.row_start)), np.asarray(layout.x(t.row_end))
    tall = np.where(second | t.table.fused.astype(bool), height / 2, height)
    top = y + t.table.rank * layout.row + 1 + np.where(second, height / 2, 0.0)
    for rank in range(t.stages):
        part = np.arange(t.table.first[rank], t.table.first[rank + 1])
        for code, letter in enumerate(KINDS):
            mine = part[t.table.kind[part] == code]
            columns = (c[mine].tolist() for c in (x0, top, x1 - x0, tall))
            path = "".join(f"M{a:.1f},{b:.1f}h{w:.2f}v{h:.1f}h{-w:.2f}z" for a, b, w, h in zip(*columns) if w > 0)
            if path:
                parts.append(f'<path d="{path}" fill="{SOLID[letter]}" stroke="#fff" stroke-width=".4"/>')
        _rank_hover(parts, t, layout, y, rank)


def _rank_hover(parts: list[str], t: Timeline, layout: Layout, y: float, rank: int) -> None:
    idle = t.makespan - float(t.busy_per_rank[rank])
    width = float(layout.x(t.makespan)) - LEFT
    place = f'x="{LEFT}" y="{y + rank * layout.row + 1:.1f}" width="{width:.1f}" height="{layout.row - 2:.1f}"'
    parts.append(
        f'<g class="g"><rect {place} fill="none" pointer-events="all"/><title>rank {rank}: idle {idle:.6g} of {t.makespan:.6g}</title></g>'
    )


def _shares(parts: list[str], t: Timeline, layout: Layout, y: float, prefix: str) -> None:
    """Too many actions to draw: for each rank and slice of time, how much of it each kind fills, stacked from below."""
    edges = np.linspace(0.0, t.makespan, BINS + 1)
    step = edges[1]
    filled = busy_shares(t, BINS)
    xs = np.asarray(layout.x(edges))
    for rank in range(t.stages):
        floor = y + (rank + 1) * layout.row - 1
        base = np.zeros(BINS)
        for code, letter in enumerate(KINDS):
            share = filled[rank, code] / step
            if not share.any():
                continue
            low, high = floor - base * (layout.row - 2), floor - (base + share) * (layout.row - 2)
            parts.append(f'<path d="{_band(xs, low, high)}" fill="{SOLID[letter]}"/>')
            base = base + share
        _rank_hover(parts, t, layout, y, rank)


def busy_shares(t: Timeline, bins: int) -> np.ndarray:
    """Seconds of work [ranks, kinds, bins] in equal slices of the makespan: the difference of each kind's running total at the slices' edges."""
    table, edges = t.table, np.linspace(0.0, t.makespan, bins + 1)
    alone = np.ones(len(table))
    pair = t.nodes.second >= 0
    alone[t.nodes.row[pair]] = alone[t.nodes.second[pair]] = 0.5  # a pair's time is shown half and half
    out = np.zeros((t.stages, len(KINDS), bins))
    for rank in range(t.stages):
        part = slice(table.first[rank], table.first[rank + 1])
        for code in range(len(KINDS)):
            mine = np.flatnonzero(table.kind[part] == code) + table.first[rank]
            if not len(mine):
                continue
            start, end = t.row_start[mine], t.row_end[mine]
            total = np.concatenate([[0.0], np.cumsum((end - start) * alone[mine])])
            before = np.searchsorted(end, edges)  # actions that have ended by each edge
            running = np.minimum(before, len(mine) - 1)
            partial = np.clip(edges - start[running], 0.0, None) * alone[mine[running]] * (before < len(mine))
            out[rank, code] = np.diff(total[before] + partial)
    return out


def _band(xs: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """A stepped band between two heights as an SVG path; slices of equal height become one step."""
    change = (np.abs(np.diff(high)) > 0.05) | (np.abs(np.diff(low)) > 0.05)
    starts = np.flatnonzero(np.concatenate([[True], change]))
    ends = np.append(starts[1:], len(high))
    upper = "".join(f"V{high[a]:.1f}H{xs[b]:.1f}" for a, b in zip(starts, ends))
    lower = "".join(f"V{low[a]:.1f}H{xs[a]:.1f}" for a in starts[::-1])
    return f"M{xs[0]:.1f},{low[0]:.1f}{upper}{lower}Z"


def _collectives(parts: list[str], t: Timeline, layout: Layout, y: float) -> None:
    """Gathers and reductions as thin bars at the foot of each lane."""
    for c in t.collectives:
        x0, x1 = float(layout.x(c.start)), float(layout.x(c.end))
        place = f'x="{x0:.2f}" y="{y + (c.rank + 1) * layout.row - 4:.1f}" width="{max(x1 - x0, 0.5):.2f}" height="3.5"'
        parts.append(
            f'<g class="g"><rect class="b" {place} fill="url(#G0)"/><title>{c.kind} of stage {c.stage}: {c.start:.6g} to {c.end:.6g}</title></g>'
        )


def ticks(length: float, about: int = 10) -> list[float]:
    """Round values from 0 to `length`."""
    raw = length / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
    return [round(k * step, 12) for k in range(int(length / step + 1e-9) + 1)]


def _axis(parts: list[str], t: Timeline, layout: Layout, y: float) -> float:
    for value in ticks(t.makespan):
        x = float(layout.x(value))
        parts.append(
            f'<path d="M{x:.1f},{y:.1f}v4" stroke="#333"/><text class="k" text-anchor="middle" x="{x:.1f}" y="{y + 15:.1f}">{value:g}</text>'
        )
    parts.append(
        f'<path d="M{LEFT},{y:.1f}H{float(layout.x(t.makespan)):.1f}" stroke="#333"/><text class="l" x="{LEFT - 6}" y="{y + 15:.1f}">time</text>'
    )
    return y + 20


def _memory(parts: list[str], t: Timeline, layout: Layout, y: float) -> float:
    """Activations held over time, for every rank or for some across the pipeline, on one vertical scale."""
    ranks = sorted(
        {*range(t.stages)} if t.stages <= 8 else {round(k * (t.stages - 1) / 5) for k in range(6)} | {int(np.argmax(t.peak_per_rank))}
    )
    top, height = max(t.peak_per_rank), 30.0
    some = "" if len(ranks) == t.stages else f" (of {len(ranks)} of {t.stages} ranks)"
    parts.append(
        f'<text class="k" x="{LEFT}" y="{y + 9:.1f}">activations held, in microbatches of one rank{some}; the line is {top:.4g}</text>'
    )
    y += 14
    for rank in ranks:
        times, held = t.memory_curve(rank)
        lasting = np.append(np.diff(times) > 1e-9 * t.makespan, True)  # what is freed and taken at one moment shows no dip
        times, held = times[lasting], held[lasting]
        floor = y + height
        heights = floor - np.asarray(held) / top * (height - 4)
        xs = np.append(np.asarray(layout.x(times)), float(layout.x(t.makespan)))
        if len(times) > 2 * BINS:
            xs, heights = _thin(xs, heights)
        steps = "".join(f"H{x:.1f}V{h:.1f}" for x, h in zip(xs[:-1], heights))
        peak = t.peak_per_rank[rank]
        parts.append(f'<path d="M{LEFT},{floor - height + 4:.1f}H{xs[-1]:.1f}" stroke="#999" stroke-dasharray="2 3"/>')
        parts.append(
            f'<g class="g"><path d="M{LEFT},{floor:.1f}{steps}H{xs[-1]:.1f}V{floor:.1f}Z" fill="#e3e3e3" stroke="#222"/>'
            f"<title>rank {rank}: peak {peak:.6g}</title></g>"
        )
        parts.append(
            f'<text class="l" x="{LEFT - 6}" y="{floor - height / 2 - 1:.1f}">rank {rank}</text>'
            f'<text class="l" x="{LEFT - 6}" y="{floor - height / 2 + 11:.1f}">peak {peak:.4g}</text>'
        )
        y += height + 6
    return y


def _thin(xs: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve with more points than pixels: of each pixel, the highest point (the lowest y)."""
    column = np.floor(xs[:-1]).astype(int)
    first = np.flatnonzero(np.concatenate([[True], np.diff(column) > 0]))
    return np.append(xs[first], xs[-1]), np.minimum.reduceat(heights, first)


def _legend(parts: list[str], shown: Sequence[Timeline], layout: Layout, y: float) -> float:
    kinds = [k for k in KINDS if any((t.table.kind == KINDS.index(k)).any() for t in shown)]
    kinds += ["G"] if any(t.collectives for t in shown) else []
    x = float(LEFT)
    for kind in kinds:
        text = f"{kind}: {WORDS[kind]}" if kind != "G" else WORDS[kind]
        fill = f"url(#{kind}0)" if layout.detail == "numbered" or kind == "G" else SOLID[kind]
        parts.append(
            f'<rect class="b" x="{x:.0f}" y="{y:.0f}" width="22" height="13" fill="{fill}"/><text class="k" x="{x + 27:.0f}" y="{y + 10.5:.0f}">{text}</text>'
        )
        x += 44 + 6.2 * len(text)
    numbered = layout.detail == "numbered"
    extra = {"numbered": ["numbers are microbatches"], "block": [], "share": ["stacked: the share of each moment that a kind fills"]}[
        layout.detail
    ]
    if numbered and any(t.virtual_stages > 1 for t in shown):
        extra.append("letters chunks (darker: later)")
    if any((t.nodes.second >= 0).any() for t in shown) and layout.detail != "share":
        extra.append("above each other: overlapped")
    extra.append("light gray: idle")
    parts.append(f'<text class="k" x="{x:.0f}" y="{y + 10.5:.0f}">{"; ".join(extra)}</text>')
    y += 20
    if numbered:
        parts.append(
            f'<rect class="c" x="{LEFT + 1}" y="{y + 1:.0f}" width="20" height="11" fill="#fff"/>'
            f'<text class="k" x="{LEFT + 27}" y="{y + 10.5:.0f}">on the critical path</text>'
        )
        y += 20
    return y + 4
