"""A step of training as a symbolic tape of allocations and frees (rules of PyTorch 2.13), replayed once a structure for all its plans."""

from __future__ import annotations

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ..memory_table import MemoryTable
from ..table import PlanTable


def can_express(model: ModelSpec, job: TrainingJob, structure: Structure) -> bool:
    """Whether the tape has a rule for everything that this structure does."""
    return False


def memory_rows(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> MemoryTable:
    """`MemoryTable` of plans of one structure."""
    raise NotImplementedError
