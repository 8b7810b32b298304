"""When a plan's software is from, and what older software costs."""

from __future__ import annotations

from ..spec.cluster import ClusterSpec
from ..spec.plan import Structure
from .kernels import Constants

NEWEST = 2026.3  # software that is assumed where a plan names no date


def software_year(structure: Structure) -> float:
    """``2025-06`` -> 2025.46; the newest where none is named."""
    if not structure.framework_date:
        return NEWEST
    year, month = structure.framework_date.split("-")
    return int(year) + (int(month) - 0.5) / 12


def software_factor(cluster: ClusterSpec, year: float, table: Constants) -> float:
    """How much longer a step takes with software from before its GPU's libraries had settled: a documented prior, `rate` a year."""
    law = table["software"]
    settled = law["settled"].get(cluster.gpu.arch)
    if settled is None:
        return 1.0
    return float((1.0 + law["rate"]) ** min(max(settled - year, 0.0), law["years"]))
