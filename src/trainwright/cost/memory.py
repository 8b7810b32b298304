"""How much memory: the peak, what it is made of and when it comes, for every plan of a table at once.

Two engines compute live tensors. The *tape* replays allocations and frees of a step symbolically, exact to the byte for PyTorch's own
parallelism (FSDP2, DDP, ZeroRedundancyOptimizer, DTensor). The *ledger* sums published rules for frameworks with buffers of their own
(Megatron-Core, DeepSpeed, FSDP1), for offload and for quantized bases. `frameworks.base.MemoryRules.engine` says which; a structure that
the tape cannot express goes to the ledger. `cost.device` then adds what is no tensor: reserved and device memory, host and disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from ..frameworks import FRAMEWORKS
from ..schedules import SCHEDULES
from ..sharding import SHARDINGS
from ..spec.blocks import Block
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from . import tape
from .device import finish
from .distinct import distinct
from .memory_table import MemoryTable, scatter
from .table import PlanTable, merged


def memory(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, limit: int | None = None) -> MemoryTable:
    """`MemoryTable` with one row for each plan of `table`, in its order. With a `limit` a plan whose peak is above it may say less than it needs, but
    never less than the limit."""
    kinds = one_window(model)
    parts, where = [], []
    for structure, rows in merged(table, _replays_alike).by_structure():
        for engine, some in by_engine(kinds, job, structure, table, rows):
            some_limit = {"limit": limit} if limit is not None and engine is tape else {}
            parts.append(engine.memory_rows(kinds, cluster, job, structure, table.take(some), **some_limit))
            where.append(some)
    return finish(model, cluster, job, table, scatter(parts, where))


@lru_cache(maxsize=256)
def one_window(model: ModelSpec) -> ModelSpec:
    """The model with blocks that differ in the windows of their attention alone as one kind: how far a query looks back changes no tensor's size."""
    first: dict[Block, str] = {}
    for name in sorted(model.blocks, key=len):
        first.setdefault(_unwindowed(model.blocks[name]), name)
    names = {name: first[_unwindowed(block)] for name, block in model.blocks.items()}
    if all(name == kind for name, kind in names.items()):
        return model
    return replace(model, blocks={kind: model.blocks[kind] for kind in first.values()}, layers=tuple(names[name] for name in model.layers))


def _unwindowed(block: Block) -> Block:
    return Block("", tuple(replace(op, window=None) for op in block.ops))


@lru_cache(maxsize=4096)
def _replays_alike(s: Structure) -> Structure:
    """Schedules that place stages alike differ in what is in flight alone, which engines look up row by row."""
    alike = {"loop": "gpipe" if s.schedule == "gpipe" else "1f1b", "v": "zb-v", "bidirectional": "dualpipe"}
    return replace(s, schedule=alike[SCHEDULES[s.schedule].placement])


def saved_by_layer(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable) -> NDArray[np.float64]:
    """[kinds, plans] bytes that the forward pass of one micro-batch leaves for backward in a layer, or in `recompute_every` layers with full recomputation, for
    each of `ModelSpec.counts`; never more than a plan's memory counts. Schedules are alike, and so are shardings."""
    kinds = one_window(model)
    most = max((s.sharding for s in table.structures), key=lambda name: SHARDINGS[name].stage or 0, default="none")
    found = np.zeros((len(kinds.counts), len(table)))
    for structure, rows in merged(table, partial(_saves_alike, most)).by_structure():
        for engine, some in by_engine(kinds, job, structure, table, rows):
            part = table.take(some)
            several = ((part.pp > 1).astype(np.int64), (part.dp * part.cp > 1).astype(np.int64))  # whether there are, not how many
            first, where = distinct([part.micro_batch_size, part.tp, part.cp, part.ep, part.etp, *several])
            found[:, some] = engine.saved_by_layer(kinds, cluster, job, structure, part.take(first))[:, where]
    order = [_unwindowed(block) for block, _ in kinds.counts]
    return found[[order.index(_unwindowed(block)) for block, _ in model.counts]]


@lru_cache(maxsize=4096)
def _saves_alike(sharding: str, s: Structure) -> Structure:
    return replace(s, schedule="1f1b", layers_per_stage=None, sharding=sharding)


def by_engine(
    model: ModelSpec, job: TrainingJob, structure: Structure, table: PlanTable, rows: NDArray[np.intp]
) -> Iterator[tuple[ModuleType, NDArray[np.intp]]]:
    """The rows of a structure with the engine that its framework names; the ledger takes what the tape has no rule for."""
    known = on_tape(model, job, structure, table.take(rows))
    if known.any():
        yield tape, rows[known]
    if not known.all():
        yield import_module("trainwright.cost.ledger"), rows[~known]


def on_tape(model: ModelSpec, job: TrainingJob, structure: Structure, table: PlanTable) -> NDArray[np.bool_]:
    """Which plans of a structure the tape computes."""
    if FRAMEWORKS[structure.framework].memory.engine == "tape" and tape.can_express(model, job, structure):
        return tape.has_rule(model, job, structure, table)
    return np.zeros(len(table), dtype=bool)
