"""Published training runs: ``known_runs.csv``, what somebody said that a model took, with its source.

``implied_mfu_6nd`` is 6 x active parameters x tokens over all GPU-hours at the dense peak. It understates the steady state: the hours hold restarts,
evaluation and extension of the context. `notes` says where hours cover more than one run or are a plan.
"""

from __future__ import annotations

from typing import Any

from . import tables

NUMBERS = ("params", "active_params", "tokens", "gpus", "gpu_hours", "days", "energy_mwh", "tco2", "cost_usd", "implied_mfu_6nd")


def list_runs() -> list[dict[str, Any]]:
    """One plain row a run, numbers as numbers and None where nothing was published."""
    return [{key: _number(value) if key in NUMBERS else value for key, value in row.items()} for row in tables.rows("known_runs.csv")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def implied_mfu(active_parameters: float, tokens: float, gpu_hours: float, peak_flops: float) -> float:
    """6 N D over GPU-hours x dense peak (Kaplan et al., arXiv:2001.08361: 6 FLOPs a parameter and token)."""
    return 6 * active_parameters * tokens / (gpu_hours * 3600 * peak_flops)
