"""A step of training as a symbolic tape of allocations and frees (rules of PyTorch 2.13), replayed once a structure for all its plans.

`sizes` names what is counted, `machine` is storages, tensors and the backward engine, `ops` are PyTorch's operations, `blocks` turns a
model's rows into them (`chunks`, `experts` and `ring` what is more than a row), `fsdp` and `checkpoint` add what FSDP2 and recomputation do,
`step` is one step of a stage, `program` its matrices, `engine` their columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.optimizer import OPTIMIZERS
from ...spec.plan import Structure
from ..table import PlanTable
from .blocks import KINDS, MIXTURE
from .engine import memory_rows, saved_by_layer

__all__ = ["can_express", "has_rule", "memory_rows", "saved_by_layer"]


def can_express(model: ModelSpec, job: TrainingJob, structure: Structure) -> bool:
    """Whether the tape has a rule for everything that this structure does; the ledger takes the rest."""
    kinds = {op.kind for block in (model.embedding, model.head, *model.blocks.values()) for op in block}
    plain = structure.offload == "none" and not structure.compile and job.loss in ("plain", "vocab-parallel", "chunked", "fused")
    weights = job.method != "qlora" and job.base_quantization is None and not OPTIMIZERS[job.optimizer].pageable
    frozen_in_fp32 = job.method == "lora" and job.master_weights == "fp32" and structure.framework == "ddp"
    plain = plain and not job.dropout and set(structure.recompute_modules) <= {"core_attn"}
    known = KINDS | MIXTURE if _has_capacity(model, job, structure) else KINDS
    return kinds <= known and plain and weights and not frozen_in_fp32


def _has_capacity(model: ModelSpec, job: TrainingJob, structure: Structure) -> bool:
    """Whether the experts are Mixtral's with a capacity, so that all shapes are known, run in one type and kept or recomputed whole."""
    whole = job.method == "full" and not job.autocast and structure.recompute != "selective"
    return model.family == "mixtral" and job.moe_capacity_factor is not None and whole


def has_rule(model: ModelSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> NDArray[np.bool_]:
    """Which plans of a structure the tape can replay: context parallelism is PyTorch's ring alone (`_goes_round`), what trains adapters on one rank of plain
    PyTorch joins products (`ledger.packed`), a loss in pieces takes whole sequences on one rank, and experts with a capacity are all on every rank or cut
    by FSDP2 alone."""
    known: NDArray[np.bool_] = (table.cp == 1) | (
        _goes_round(job, structure) & (table.tp == 1) & (table.pp == 1) & (job.seq_len % (2 * table.cp) == 0)
    )
    if structure.framework == "ddp" and job.method == "lora":
        known = known & (table.gpus > 1)
    if job.loss in ("chunked", "fused"):
        known = known & (table.tp == 1) & (table.pp == 1)
    if model.is_moe:
        known = known & (table.tp == 1) & (table.ep == 1) & (table.pp == 1)
    return known


def _goes_round(job: TrainingJob, structure: Structure) -> bool:
    """Whether context parallelism is PyTorch's own ring around its flash kernel, in one type."""
    plain = structure.attention == "flash" and structure.recompute != "selective" and not job.autocast and job.method == "full"
    return structure.framework == "fsdp2" and structure.sharding != "none" and structure.cp_kind in ("ring", "allgather") and plain
