"""What is paid once a step: the optimizer's bytes, and what offload moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..frameworks import FRAMEWORKS
from ..frameworks.dtypes import dtypes
from ..spec.blocks import Block
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .flops import Shares, lora_parameters
from .kernels import Constants
from .layer import local_parameters
from .overlap import behind
from .table import Column, PlanTable


def expert_parameters(block: Block, shares: Shares) -> Column:
    """Parameters of the experts alone, on one rank."""
    total = np.zeros_like(shares.tokens)
    for op in block.ops:
        for w in op.weights:
            if w.ep_dim is not None:
                total = total + w.elements / (shares.ep * (shares.etp if w.tp_dim is not None else 1.0))
    return total


def owned_parameters(
    model: ModelSpec,
    job: TrainingJob,
    structure: Structure,
    table: PlanTable,
    layers: NDArray[np.float64],
    ends: NDArray[np.float64],
    shares: Shares,
    spread: Callable[[Column], Column],
) -> Column:
    """Parameters that one rank updates: its layers and ends, over the ranks that share their optimizer state. `layers` [kinds, plans], `ends` [2, plans]."""
    sharded = structure.sharding != "none"
    over = table.dp_shard * (table.cp if FRAMEWORKS[structure.framework].shards_over_cp else 1)
    shard = over.astype(float) if sharded else np.ones(len(table))
    if job.method != "full":
        return lora_parameters(model, job) / (table.tp * table.pp) / shard
    dense = experts = np.zeros(len(table))
    blocks = [*(b for b, _ in model.counts), model.embedding, model.head]
    for n, block in zip([*layers, *ends], blocks):
        special = expert_parameters(block, shares)
        dense = dense + n * spread(local_parameters(block, shares) - special)
        if block.rows("grouped_linear"):
            experts = experts + n * spread(special)
    if not sharded:
        return dense + experts
    return dense / shard + experts / np.maximum(1.0, shard * table.tp / (table.ep * table.etp))


def optimizer_seconds(owned: Column, job: TrainingJob, structure: Structure, bytes_per_s: float, table: Constants) -> Column:
    """Bytes that reading and writing parameters, moments and gradients moves, over the memory bandwidth."""
    law, types = table["optimizer"], dtypes(FRAMEWORKS[structure.framework], job, structure, alone=False)
    return owned * (law["bytes_per_parameter"] + law["gradient_passes"] * types.reduced) / bytes_per_s


def offload_seconds(
    kind: str, owned: Column, saved_bytes: Column, compute: Column, microbatches: Column, cluster: ClusterSpec, table: Constants
) -> Column:
    """What offload adds to a step, the optimizer's own time included where that moves to the host.

    ``optimizer-*``: gradients down, parameters up, the update at host memory's speed, on NVMe the states read and written as well. ``params-*``: the
    16-bit parameters come up for each pass of each micro-batch, on top. ``activations-cpu``: `saved_bytes` of a micro-batch go down and come back
    behind its `compute`, at the pace of the slower of the link and a GPU's share of host memory.
    """
    law = table["offload"]
    link = cluster.gpu.pcie_bytes_per_s * law["pcie_share"] or law["pcie_bytes_per_s"]
    if kind == "activations-cpu":
        link = min(link, law["host_bytes_per_s"] / cluster.gpus_per_node)
        return microbatches * behind(2.0 * saved_bytes / link, compute, table["overlap"]["slowdown"])
    update = owned * (law["cpu_bytes_per_parameter"] * cluster.gpus_per_node / law["host_bytes_per_s"] + 4.0 / link)
    if kind.endswith("nvme"):
        update = update + owned * law["nvme_bytes_per_parameter"] / law["nvme_bytes_per_s"]
    if kind.startswith("params"):
        update = update + 2.0 * 2.0 * owned * microbatches / link
    return update


def saved_bytes(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable) -> Column:
    """What one micro-batch leaves for backward on the rank that holds most: all of it goes to the host (``save_on_cpu``)."""
    from .memory import memory

    return memory(model, cluster, job, table).saved_bytes.astype(float)
