"""A lower bound on a plan's memory, in a few array operations: what no engine of `cost.memory` can go below.

The first pipeline rank holds, at the end of its first forward passes, the weights and optimizer states of its layers and what every framework saves of them:
inputs of products, of norms and of activations, q, k, v and the output of fused attention (12 h + 4 k/n h + 6 f bytes a token for a Llama layer in 16 bit); the
input of a block alone with recomputation. Everything that a framework may avoid is left out, so plans that the bound refuses never fit, and most plans that do
not fit are refused by it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..cost.kernels import constants
from ..cost.table import Column, PlanTable
from ..schedules import SCHEDULES
from ..sharding import SHARDINGS
from ..spec.blocks import Block
from ..spec.optimizer import OPTIMIZERS
from ..spec.plan import Structure
from ..spec.precision import DTYPE_BYTES, activation_bytes
from .rules import Case


def least_device_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a card that every plan needs at least; float, one entry a plan.

    The largest of what a rank holds after its forward passes, at the loss, and once gradients exist.
    """
    found = np.zeros(len(table))
    for structure, rows in table.by_structure():
        part = table.take(rows)
        layers = first_rank_layers(case, structure, part)
        owned = states(case, structure, part, layers)
        whole = gradients(case, structure, part, layers)
        loss = logits(case, structure, part)
        gathered = unsharded(case, structure, part, layers)
        several = (part.pp > 1) & (part.accumulation > 1)
        stays = np.where(
            "parameters" in SHARDINGS[structure.sharding].splits, 0.0, gathered
        )  # from the forward pass to the end of the backward pass
        later = owned + whole + np.where(several, loss + stays, 0.0)  # on the last rank
        if structure.offload != "activations-cpu":
            one, flying = saved(case, structure, part, layers), in_flight(structure, part)
            alone = np.where(part.pp == 1, loss, 0.0)
            first = owned + stays + one * flying + np.maximum(alone, recomputed(case, structure, part))
            inside = owned + whole + np.where(several, gathered + one * np.maximum(flying - 1, 0), 0.0)
            later = np.maximum(np.maximum(first, inside), later)
        mean = case.layers / part.pp  # some rank has so many
        fullest = states(case, structure, part, mean) + gradients(case, structure, part, mean)
        fullest = fullest + np.where(several, unsharded(case, structure, part, mean), 0.0)
        later = np.maximum(later, fullest)
        found[rows] = later
    return found


def least_offload_seconds(case: Case, table: PlanTable) -> Column:
    """A step lasts at least as long as what activation offload moves takes on PCIe, down and up; 0 for other plans."""
    moved = least_moved_bytes(case, table) * table.accumulation
    return np.where(moved > 0, 2.0 * moved / (case.cluster.gpu.pcie_bytes_per_s * constants()["offload"]["pcie_share"]), 0.0)


def least_moved_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a micro-batch that activation offload moves to the host, at least; 0 for other plans."""
    found = np.zeros(len(table))
    for structure, rows in table.by_structure():
        if structure.offload == "activations-cpu":
            part = table.take(rows)
            found[rows] = saved(case, structure, part, first_rank_layers(case, structure, part))
    return found


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


def states(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Weights and optimizer states of the layers, sharded as far as anybody shards them."""
    job, splits = case.job, SHARDINGS[structure.sharding].splits
    if structure.offload.startswith("params"):
        return np.zeros(len(table))
    shards = np.maximum(table.dp_shard * table.cp, 1)
    dense = min((sum(op.parameters for op in block if op.kind != "grouped_linear") for block, _ in case.model.counts), default=0)
    experts = min((sum(op.parameters for op in block.rows("grouped_linear")) for block, _ in case.model.counts), default=0)
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
    dense = min((sum(op.parameters for op in block if op.kind != "grouped_linear") for block, _ in case.model.counts), default=0)
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
    dense = min((sum(op.parameters for op in block if op.kind != "grouped_linear") for block, _ in case.model.counts), default=0)
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


def recomputed(case: Case, structure: Structure, table: PlanTable) -> Column:
    """What one layer saves, which is there again when backward reaches it."""
    if structure.recompute != "full" or structure.compile or case.job.method != "full":
        return np.zeros(len(table))
    plain = replace(structure, recompute="none", recompute_every=1)
    return saved(case, plain, table, np.ones(len(table)))


def in_flight(structure: Structure, table: PlanTable) -> Column:
    """Micro-batches whose activations the first rank holds at once, in units of all of its layers; 1 where no closed form is known."""
    schedule = SCHEDULES.get(structure.schedule)
    if not (table.pp > 1).any():
        return np.ones(len(table))
    if structure.schedule in ("gpipe", "looped-bfs"):
        return np.where(table.pp > 1, table.accumulation, 1).astype(float)
    if schedule is None or schedule.in_flight is None:
        return np.ones(len(table))
    flying = np.asarray(schedule.in_flight(table.pp, table.accumulation, table.virtual_stages, np.zeros(len(table))), dtype=float)
    return np.where(table.pp > 1, np.maximum(np.broadcast_to(flying, (len(table),)), 1.0), 1.0)


def saved(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """What the forward pass of one micro-batch leaves for backward, on the card or not."""
    if case.job.method != "full":
        return np.zeros(len(table))
    narrow = 1 if case.job.precision in ("fp8", "fp4") else activation_bytes(case.job.precision)
    tokens = table.micro_batch_size * case.job.seq_len / table.cp
    sequence = np.where(structure.sequence_parallel, table.tp, 1)
    if structure.compile or not _keeps_all(case, structure):
        width = case.model.hidden / sequence / max(structure.recompute_every, 1)
        if structure.recompute == "selective" and not structure.compile and case.framework(structure).memory.selective == "op-list":
            width = width + min((second_products(block) for block, _ in case.model.counts), default=0) / table.tp
    else:
        widths = [block_widths(block) for block, _ in case.model.counts]
        width = min(w[0] for w in widths) / sequence + min(w[1] for w in widths) / table.tp
    return tokens * width * narrow * np.floor(layers)


def _keeps_all(case: Case, structure: Structure) -> bool:
    """Whether what products, norms and activations read is saved: without recomputation, or where selective means the attention core alone."""
    core_only = case.framework(structure).memory.selective == "core_attn" and structure.recompute_modules in ((), ("core_attn",))
    return structure.recompute == "none" or (structure.recompute == "selective" and core_only)


def second_products(block: Block) -> int:
    """Elements a token of the outputs of every second matrix product, whichever comes first; 0 where products have biases, which do not count as such."""
    products = [op for op in block if op.kind == "linear"]
    if any(len(op.weights) != 1 for op in products) or any(op.experts for op in block):
        return 0
    return min(sum(op.width for op in products[k::2]) for k in (0, 1))


def block_widths(block: Block) -> tuple[int, int]:
    """Elements a token that are saved: (whole or split by sequence parallelism, split by tensor parallelism). Experts are left out."""
    region = {"x": "sequence"} | {op.output: op.region for op in block}
    width = {op.output: op.width for op in block}
    made_by = {op.output: op.kind for op in block}
    found: dict[str, int] = {}
    for op in block:
        if op.experts or op.kind not in ("linear", "attention", "activation", "multiply", "norm") or (op.heads and op.kind == "norm"):
            continue
        if op.kind == "activation" and op.function.startswith("relu"):  # keeps its output
            continue
        names = op.inputs[:1] if op.kind in ("linear", "norm", "activation") else op.inputs
        for name in names:
            if op.kind == "multiply" and made_by.get(name) == "activation":
                continue
            size = op.k if op.kind == "linear" else width.get(name, 0)
            if op.kind == "attention":
                size = (op.heads if name == op.inputs[0] else op.kv_heads) * op.head_dim
                if name == op.inputs[2]:
                    size = op.kv_heads * op.v_head_dim
            found[name] = max(found.get(name, 0), size)
    split = sum(n for name, n in found.items() if region.get(name, "tensor") == "tensor")
    return sum(found.values()) - split, split
