"""A published figure: JSON with what was claimed (``model``, ``gpu``, ``n_gpus``, ``measured_peak_gb``, ``claimed_mfu``, ...), alone or under ``claim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..setup import Reading
from . import Format

FIGURES = frozenset((
    "measured_peak_gb", "tokens_per_s_total", "tokens_per_s_per_gpu", "tokens_per_s", "claimed_mfu", "tflops_per_gpu", "step_s",
    "reported_over_implied_tflops", "global_batch_times_seq_over_step_over_gpus",
))  # fmt: skip


def claimed(document: Document) -> Mapping[str, Any]:
    """The table of the claim."""
    data = document.data if isinstance(document.data, Mapping) else {}
    inner = data.get("claim")
    return inner if isinstance(inner, Mapping) else data


def recognizes(document: Document) -> float:
    if document.syntax not in ("json", "yaml", "toml") or not isinstance(document.data, Mapping) or "zero_optimization" in document.data:
        return 0.0
    wrapped = isinstance(document.data.get("claim"), Mapping)
    return 0.96 if FIGURES & claimed(document).keys() and (wrapped or len(document.data) < 30) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    return Reading(document, "claim", fragment=True)


FORMAT = Format("claim", "a published figure", recognizes, read, ("figure",), "")
