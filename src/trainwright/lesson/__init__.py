"""The lesson on distributed training: its five functions, its tables, every demonstration in its order, and its five exercises.

`run` performs all of it. Where the lesson errs, a line says so, with the right figure.
"""

from __future__ import annotations

from .functions import (
    memory_calculator,
    mixed_precision_comparison,
    simulate_data_parallelism,
    simulate_pipeline_parallelism,
    simulate_tensor_parallelism,
)
from .tables import tables

__all__ = [
    "memory_calculator",
    "mixed_precision_comparison",
    "simulate_data_parallelism",
    "simulate_pipeline_parallelism",
    "simulate_tensor_parallelism",
    "tables",
]
