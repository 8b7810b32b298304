"""Small tables of measured facts, each row with its source: how often clusters fail, what nodes draw."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from statistics import median


@cache
def rows(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of ``catalog/<name>.csv`` as text."""
    text = resources.files("trainwright.catalog").joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def failures_per_1000_node_days() -> float:
    """Unplanned interruptions of 1,000 nodes of 8 GPUs in a day: the median of the independent rows of ``failures.csv``."""
    return median(float(r["per_1000_node_days"]) for r in rows("failures") if r["basis"] == "yes")


@cache
def node_watts(gpu: str) -> float | None:
    """What a whole node is rated at, per GPU; None where no row knows that GPU (matched by the start of its id)."""
    found = [r for r in rows("power") if r["kind"] == "rating" and gpu.startswith(r["gpu"])]
    return float(found[0]["watts"]) if found else None


@cache
def node_over_board() -> float:
    """Median of a node's rating per GPU over its board's."""
    return median(float(r["watts"]) / float(r["board_watts"]) for r in rows("power") if r["kind"] == "rating")
