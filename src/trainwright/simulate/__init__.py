"""Exact simulation: what every parallel strategy computes, sends and holds, on real arrays in a virtual world of ranks.

    from trainwright import simulate
    report = simulate.fsdp(ranks=4, zero=3)            # tables, figures and notes; the same words as `trainwright simulate fsdp --ranks 4 --zero 3`
    report = simulate.run("tensor-parallel", ranks=2)

Every study trains a small real transformer under the strategy and on one device, from the same weights on the same tokens, and compares loss, gradients,
weights and bytes sent. `check.compare` does so for any `layout.Layout`; `world` holds the ranks and `collectives` their algorithms.
"""

from __future__ import annotations

from typing import Any

from .report import Report, Table
from .studies import STUDIES, Study
from .studies.accumulation import accumulation
from .studies.collectives import collectives
from .studies.combined import combined
from .studies.context_parallel import context_parallel
from .studies.data_parallel import data_parallel
from .studies.expert_parallel import expert_parallel
from .studies.fsdp import fsdp
from .studies.mixed_precision import mixed_precision
from .studies.offload import offload
from .studies.pipeline import pipeline
from .studies.recompute import recompute
from .studies.sequence_parallel import sequence_parallel
from .studies.tensor_parallel import tensor_parallel

__all__ = [
    "STUDIES",
    "Report",
    "Study",
    "Table",
    "accumulation",
    "collectives",
    "combined",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "fsdp",
    "mixed_precision",
    "offload",
    "pipeline",
    "recompute",
    "run",
    "sequence_parallel",
    "tensor_parallel",
]


def run(study: str, **options: Any) -> Report:
    """The study of that name (``data-parallel``, ``fsdp``, ...) with its options. Raises `SpecError` for an unknown name or a layout that cannot be."""
    found: Study = STUDIES.get_or_raise(study, "study")
    return found.run(**options)
