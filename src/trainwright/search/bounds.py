"""A lower bound on a plan's memory, in a few array operations: what no engine of `cost.memory` can go below.

The first pipeline rank holds, at the end of its first forward passes, the weights and optimizer states of its layers and what its layers save for backward
(`cost.memory.saved_by_layer`), for as many micro-batches as its schedule has in flight. What a framework may avoid of the rest is left out, so plans that
the bound refuses never fit, and most plans that do not fit are refused by it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..cost.kernels import constants
from ..cost.memory import saved_by_layer
from ..cost.table import Column, PlanTable
from ..schedules import SCHEDULES
from ..sharding import SHARDINGS
from ..spec.model import ModelSpec
from ..spec.optimizer import OPTIMIZERS
from ..spec.plan import Structure
from ..spec.precision import DTYPE_BYTES, activation_bytes
from .rules import Case


def least_device_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a card that every plan needs at least; float, one entry a plan.

    The largest of what a rank holds after its forward passes, at the loss, and once gradients exist. Where weights and gradients alone are too much for
    the card, activations are left out.
    """
    found = _least(case, table, None)
    rows = np.flatnonzero(found <= case.cluster.gpu.capacity_bytes)
    if len(rows):
        part = table.take(rows)
        kept = saved_by_layer(case.model, case.cluster, case.job, part), recomputed(case, part)
        found[rows] = _least(case, part, kept)
    return found


def _least(case: Case, table: PlanTable, kept: tuple[Column, Column] | None) -> Column:
    """`least_device_bytes`; `kept`: what a layer saves between forward and backward, and what it saves while it is recomputed."""
    found = np.zeros(len(table))
    for structure, rows in table.by_structure():
        part = table.take(rows)
        layers, mean = first_rank_layers(case, structure, part), case.layers / part.pp  # some rank has the mean
        owned, fullest = states(case, structure, part, layers), states(case, structure, part, mean)
        whole = gradients(case, structure, part, layers)
        loss, gathered = logits(case, structure, part), unsharded(case, structure, part, layers)
        several = (part.pp > 1) & (part.accumulation > 1)
        # from the forward pass to the end of the backward pass
        stays = np.zeros(len(rows)) if "parameters" in SHARDINGS[structure.sharding].splits else gathered
        last = owned + whole + np.where(several, loss + stays, 0.0)
        later = fullest + gradients(case, structure, part, mean) + np.where(several, unsharded(case, structure, part, mean), 0.0)
        found[rows] = np.maximum(last, later)
        if kept is not None and structure.offload != "activations-cpu":
            one, flying = kept[0][rows] * groups(structure, layers), in_flight(structure, part)
            first = owned + stays + one * flying + np.maximum(np.where(part.pp == 1, loss, 0.0), kept[1][rows])
            inside = owned + whole + np.where(several, gathered + one * np.maximum(flying - 1, 0), 0.0)
            anywhere = fullest + kept[0][rows] * groups(structure, np.ceil(mean)) * in_flight(structure, part, anywhere=True)
            found[rows] = np.maximum(np.maximum(found[rows], first), np.maximum(inside, anywhere))
    return found


def least_offload_seconds(case: Case, table: PlanTable) -> Column:
    """A step lasts at least as long as what activation offload moves takes on PCIe, down and up; 0 for other plans."""
    law, cluster = constants()["offload"], case.cluster
    link = min(cluster.gpu.pcie_bytes_per_s * law["pcie_share"], law["host_bytes_per_s"] / cluster.gpus_per_node)
    moved = least_moved_bytes(case, table) * table.accumulation
    return np.where(moved > 0, 2.0 * moved / link, 0.0)


def least_moved_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a micro-batch that activation offload moves to the host, at least; 0 for other plans."""
    found = np.zeros(len(table))
    moved = np.array([s.offload == "activations-cpu" for s in table.structures], dtype=bool)[table.structure]
    if not moved.any():
        return found
    some = np.flatnonzero(moved)
    found[some] = saved_by_layer(case.model, case.cluster, case.job, table.take(some))
    for structure, rows in table.by_structure():
        if structure.offload == "activations-cpu":
            layers = np.maximum(first_rank_layers(case, structure, table.take(rows)), np.ceil(case.layers / table.pp[rows]))
            found[rows] *= groups(structure, layers)
    return found


def groups(structure: Structure, layers: Column) -> Column:
    """Whole layers, or with full recomputation whole groups of them that are recomputed together."""
    return np.floor(layers / (max(structure.recompute_every, 1) if structure.recompute == "full" else 1))


def first_rank_layers(case: Case, structure: Structure, table: PlanTable) -> Column:
    """At least so many layers stand on the first pipeline rank: its share of the slots, larger stages first, less one for each end that it holds."""
    if structure.layers_per_stage is not None:
        return np.zeros(len(table))
    chunk, larger = np.divmod(case.layers + 2, table.pp * table.virtual_stages)
    if SCHEDULES[structure.schedule].placement == "loop":
        slots, ends = chunk * table.virtual_stages + -(-larger // table.pp), 1
    else:
        slots, ends = chunk * table.virtual_stages, 2
    return np.where(table.pp == 1, case.layers, np.maximum(slots - ends, 0)).astype(float)


@lru_cache(maxsize=256)
def smallest_layer(model: ModelSpec) -> tuple[int, int]:
    """Parameters of the smallest kind of layer: outside of experts, of experts."""
    blocks = [block for block, _ in model.counts]
    dense = min((sum(op.parameters for op in block if op.kind != "grouped_linear") for block in blocks), default=0)
    return dense, min((sum(op.parameters for op in block.rows("grouped_linear")) for block in blocks), default=0)


def states(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Weights and optimizer states of the layers, sharded as far as anybody shards them."""
    job, splits = case.job, SHARDINGS[structure.sharding].splits
    if structure.offload.startswith("params"):
        return np.zeros(len(table))
    shards = np.maximum(table.dp_shard * table.cp, 1)
    dense, experts = smallest_layer(case.model)
    if job.method == "qlora":
        return np.zeros(len(table))
    weight = activation_bytes(job.precision) if job.method == "full" or job.precision != "fp32" else 2
    if _one_copy(case, structure):
        weight = 4  # the shards; gathered copies are left out
        splits = {**splits, "parameters": "dp_shard"}
    optimizer = OPTIMIZERS[job.optimizer]
    kept = 0.0
    if job.method == "full" and not structure.offload.startswith("optimizer") and not optimizer.pageable and not optimizer.factored:
        copies = min(optimizer.copies, optimizer.copies if optimizer.matrix_copies is None else optimizer.matrix_copies)
        wide = job.master_weights == "fp32" or job.precision == "fp32"
        kept = copies * (optimizer.bytes_per_element or (4 if wide else 2))
    each = weight / (shards if "parameters" in splits else 1) + kept / (shards if "optimizer" in splits else 1)
    owned = layers * dense / table.tp * each
    if experts:
        # experts are sharded over what is left of data parallelism besides ep, at most over all of it
        owned = owned + layers * experts / (table.ep * table.etp) * (weight + kept) / np.maximum(shards, table.dp * table.cp * table.tp)
    return owned


def gradients(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Gradients of a rank's dense layers when a backward pass ends: shards where they are split, whole where nobody reduces before the end of the step.

    FSDP2 under pipeline stages adds up whole gradients, in the type of its reduction, until the last micro-batch.
    """
    job = case.job
    if job.method != "full" or job.optimizer_in_backward:
        return np.zeros(len(table))
    dense, _ = smallest_layer(case.model)
    splits = SHARDINGS[structure.sharding].splits
    shards = np.maximum(table.dp_shard * table.cp, 1) if "gradients" in splits else np.ones(len(table))
    moved = structure.offload.startswith(("optimizer", "params"))
    each = (0 if moved else min(activation_bytes(job.precision), DTYPE_BYTES[job.gradient_dtype])) / shards
    if _one_copy(case, structure):
        kept = (table.pp > 1) & (table.accumulation > 1)
        each = np.maximum(each, np.where(kept, DTYPE_BYTES[job.gradient_dtype], 0))
    return layers * dense / table.tp * each


def unsharded(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Parameters of a rank's dense layers as FSDP2 gathers them. ZeRO-2 keeps them from the forward pass on; a pipeline stage keeps what a backward
    pass gathered, except of the last one (torch/distributed/pipelining/stage.py)."""
    if not _one_copy(case, structure):
        return np.zeros(len(table))
    dense, _ = smallest_layer(case.model)
    return layers * dense / table.tp * (1 if structure.fp8_params else activation_bytes(case.job.precision))


def _one_copy(case: Case, structure: Structure) -> bool:
    """FSDP2 with mixed precision: parameters are fp32 shards, without masters beside them."""
    job = case.job
    wide = job.master_weights == "fp32" and not job.autocast and job.precision != "fp32"
    return structure.framework == "fsdp2" and "gradients" in SHARDINGS[structure.sharding].splits and job.method == "full" and wide


def logits(case: Case, structure: Structure, table: PlanTable) -> Column:
    """Logits of a micro-batch in fp32 on the rank with the loss; PyTorch's own loss has log-softmax and its gradient together."""
    if case.job.loss not in ("plain", "vocab-parallel") or structure.compile:
        return np.zeros(len(table))
    copies = 2 if structure.framework == "fsdp2" and case.job.loss == "plain" else 1
    return 4.0 * copies * table.micro_batch_size * case.job.seq_len / table.cp * case.model.vocab / table.tp


def recomputed(case: Case, table: PlanTable) -> Column:
    """What one layer saves, which is there again when backward reaches it."""
    again = np.array([s.recompute == "full" and not s.compile for s in table.structures], dtype=bool)[table.structure]
    found = np.zeros(len(table))
    if again.any():
        rows = np.flatnonzero(again)
        plain = tuple(replace(s, recompute="none", recompute_every=1) for s in table.structures)
        found[rows] = saved_by_layer(case.model, case.cluster, case.job, replace(table, structures=plain).take(rows))
    return found


def in_flight(structure: Structure, table: PlanTable, anywhere: bool = False) -> Column:
    """Micro-batches whose activations the first rank (with `anywhere`: every rank) holds at once, at least, in units of all of its layers; 1 where no
    closed form is known."""
    schedule = SCHEDULES.get(structure.schedule)
    if not (table.pp > 1).any():
        return np.ones(len(table))
    if structure.schedule in ("gpipe", "looped-bfs"):
        return np.where(table.pp > 1, table.accumulation, 1).astype(float)
    if schedule is None or schedule.in_flight is None:
        return np.ones(len(table))
    ends = (np.zeros(len(table)), table.pp - 1) if anywhere else (np.zeros(len(table)),)
    flying = np.min(
        [schedule.in_flight(table.pp, table.accumulation, table.virtual_stages, r) + np.zeros(len(table)) for r in ends], axis=0
    )
    return np.where(table.pp > 1, np.maximum(flying, 1.0), 1.0)
