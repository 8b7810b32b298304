"""Predicted against measured, as a self-contained SVG on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

SIZE, MARGIN = 560, 60
MARKS = ("circle", "square", "triangle", "cross", "diamond", "plus")
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a00", "#6a3d9a", "#444444")


def scatter_svg(points: Sequence[tuple[float, float, str, str]], title: str, unit: str) -> str:
    """`points` are (measured, predicted, group, label). The diagonal is exact, the dashed lines are 20 % off; groups differ in shape and color."""
    low = math.floor(math.log10(min(min(p[0], p[1]) for p in points)) * 2) / 2
    high = math.ceil(math.log10(max(max(p[0], p[1]) for p in points)) * 2) / 2
    span = max(high - low, 0.5)

    def at(value: float) -> float:
        return MARGIN + (SIZE - 2 * MARGIN) * (math.log10(value) - low) / span

    groups = list(dict.fromkeys(p[2] for p in points))
    parts = [_frame(title, unit, low, high, at)]
    for measured, predicted, group, label in points:
        k = groups.index(group) % len(MARKS)
        parts.append(
            _mark(
                MARKS[k],
                at(measured),
                SIZE - at(predicted),
                COLORS[k],
                f"{label}: measured {measured:.4g} {unit}, predicted {predicted:.4g}",
            )
        )
    for n, group in enumerate(groups):
        y, k = MARGIN + 18 + 16 * n, n % len(MARKS)
        parts.append(_mark(MARKS[k], MARGIN + 14, y - 4, COLORS[k], group) + f'<text x="{MARGIN + 24}" y="{y}">{escape(group)}</text>')
    style = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.axis{stroke:#222}.off{stroke:#888;stroke-dasharray:4 4}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" height="{SIZE}" role="img" aria-label="{escape(title)}">'
        f'<style>{style}</style><rect width="{SIZE}" height="{SIZE}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _frame(title: str, unit: str, low: float, high: float, at: Callable[[float], float]) -> str:
    lines = [f'<text x="{SIZE / 2}" y="24" text-anchor="middle" font-weight="bold">{escape(title)}</text>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = at(10.0**power)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{SIZE - MARGIN}"/>')
        lines.append(f'<line class="grid" x1="{MARGIN}" y1="{SIZE - x:.1f}" x2="{SIZE - MARGIN}" y2="{SIZE - x:.1f}"/>')
        lines.append(f'<text x="{x:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{10.0**power:g}</text>')
        lines.append(f'<text x="{MARGIN - 8}" y="{SIZE - x + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    a, b = at(10.0**low), at(10.0**high)
    for factor, kind in ((1.0, "axis"), (1.2, "off"), (1 / 1.2, "off")):
        shift = at(10.0**low * factor) - a
        lines.append(f'<line class="{kind}" x1="{a:.1f}" y1="{SIZE - a - shift:.1f}" x2="{b:.1f}" y2="{SIZE - b - shift:.1f}"/>')
    lines.append(f'<text x="{SIZE / 2}" y="{SIZE - 16}" text-anchor="middle">measured, {escape(unit)}</text>')
    lines.append(f'<text transform="translate(16 {SIZE / 2}) rotate(-90)" text-anchor="middle">predicted, {escape(unit)}</text>')
    return "".join(lines)


def _mark(kind: str, x: float, y: float, color: str, title: str) -> str:
    r = 3.2
    paths = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.1f} {y - r - 0.6:.1f}l{r + 0.4} {2 * r}h{-2 * (r + 0.4)}z",
        "diamond": f"M{x:.1f} {y - r - 0.8:.1f}l{r + 0.8} {r + 0.8}l{-(r + 0.8)} {r + 0.8}l{-(r + 0.8)} {-(r + 0.8)}z",
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}M{x + r:.1f} {y - r:.1f}l{-2 * r} {2 * r}",
        "plus": f"M{x - r:.1f} {y:.1f}h{2 * r}M{x:.1f} {y - r:.1f}v{2 * r}",
    }
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"' if kind == "circle" else f'<path d="{paths[kind]}"'
    return f'{shape} fill="{color}" fill-opacity="0.45" stroke="{color}"><title>{escape(title)}</title></{"circle" if kind == "circle" else "path"}>'
