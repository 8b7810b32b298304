"""From live tensors to what people see: reserved by the caching allocator, used on the device, and what host and disk must hold.

* ``reserved`` = live peak + what the allocator cannot use again at the peak (`slack`), in segments of 2 MiB.
* ``device`` = reserved + `framework`: CUDA context and loaded kernels, workspaces of the libraries, communicators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..frameworks import FRAMEWORKS
from ..frameworks.dtypes import dtypes
from ..spec.cluster import ClusterSpec, GpuSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .memory_table import MemoryTable
from .table import Column, IntColumn, PlanTable

MIB = 2**20
GB = 1e9
# A context and the kernels that PyTorch, cuBLAS, cuDNN and attention libraries load in a first step: grows with the multiprocessors (local
# memory and stacks of each). In nvidia-smi about 0.45 GB on a T4 (40), 0.5 to 0.8 on an A100 (108), 0.7 to 1.0 on an H100 (132).
CONTEXT_BASE, CONTEXT_PER_UNIT = 300 * MIB, 4.0 * MIB
# cuBLAS workspace that PyTorch allocates for a handle and stream: 8 MiB, 32 MiB on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp);
# cuBLASLt beside it.
WORKSPACE, WORKSPACE_HOPPER = 2 * 8.125 * MIB, 2 * 32 * MIB
# NCCL: buffers of a channel (4 MiB simple, 1 and 0.25 for LL128 and LL) for each peer and direction, 16 to 24 channels over NVLink.
COMMUNICATOR = 350 * MIB
# Blocks that the caching allocator holds but cannot use at its peak: a share of the tensors that come and go with each micro-batch
# (activations, logits, gathered weights), half of it holes in segments that are in use, half whole segments; and a base of cached segments.
# Inferred from published peaks, no range documented elsewhere: 5 to 20 % and 0.5 to 1.5 GB.
HOLES, FRAGMENTS, CACHED = 0.06, 0.12, 0.7 * GB
# Option ``expandable_segments`` (PYTORCH_CUDA_ALLOC_CONF): segments grow in place, holes of a few pages (2 MiB) remain.
EXPANDABLE = 0.25


def finish(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, found: MemoryTable) -> MemoryTable:
    """The engines' table with `framework`, `reserved_bytes`, `device_bytes`, host and disk filled in."""
    host = host_bytes(model, cluster, job, table, found)
    framework = framework_bytes(cluster.gpu, table)
    live = found.peak_bytes - found.breakdown["framework"]
    unavoidable, cached = slack(model, table, found)
    need = live + unavoidable
    free = cluster.gpu.capacity_bytes - framework - (1e9 * by_row(table, lambda s: s.reserved_gb)).astype(np.int64)
    reserved = up(np.where(need <= free, np.minimum(need + cached, free), need + cached), 2 * MIB)
    reserved = np.where(need <= free, np.minimum(reserved, np.maximum(free, up(need, 1))), reserved)
    return replace(
        found,
        breakdown={**found.breakdown, "framework": framework},
        peak_bytes=live + framework,
        reserved_bytes=reserved,
        device_bytes=reserved + framework,
        host_bytes_per_node=np.maximum.reduce(list(host.values())),
        nvme_bytes_per_node=nvme_bytes(cluster, table, found),
        extra={**found.extra, **interval(model, job, table, reserved + framework), **{f"host_{k}": c for k, c in host.items()}},
    )


# Measured over predicted device memory of published runs, about the 10th and 90th percentile, by framework; wider for adapters and quantized
# bases (whose scripts differ most) and for mixtures of experts (shapes that change with the routing fragment the pools).
SPREAD = {"megatron": (0.98, 1.06), "deepspeed": (0.95, 1.12), "fsdp1": (0.95, 1.20), "fsdp2": (0.94, 1.07), "ddp": (0.95, 1.08)}
WIDER = {"lora": (0.90, 1.05), "qlora": (0.80, 1.10), "moe": (0.95, 1.20)}


def interval(model: ModelSpec, job: TrainingJob, table: PlanTable, device: IntColumn) -> dict[str, IntColumn]:
    """Ends of the 80 % interval of device memory, as `extra` columns."""
    low = by_row(table, lambda s: SPREAD.get(s.framework, (0.93, 1.12))[0])
    high = by_row(table, lambda s: SPREAD.get(s.framework, (0.93, 1.12))[1])
    for kind in [job.method] * (job.method != "full") + ["moe"] * model.is_moe:
        low, high = low * WIDER[kind][0], high * WIDER[kind][1]
    return {"interval_low": np.rint(device * low).astype(np.int64), "interval_high": np.rint(device * high).astype(np.int64)}


def up(size: IntColumn | Column, unit: int) -> IntColumn:
    return (np.ceil(np.asarray(size, dtype=np.float64) / unit) * unit).astype(np.int64)


def context_bytes(gpu: GpuSpec) -> float:
    """Context, kernels and workspaces of one process."""
    workspace = WORKSPACE_HOPPER if gpu.arch.startswith(("9.", "10.", "12.")) else WORKSPACE
    return CONTEXT_BASE + CONTEXT_PER_UNIT * (gpu.compute_units or 100) + workspace


def framework_bytes(gpu: GpuSpec, table: PlanTable) -> IntColumn:
    """What is no tensor: the context, and one communicator for each mesh axis that has more than one rank."""
    axes = (table.dp, table.tp, table.pp, table.cp, table.ep)
    communicators = np.sum([axis > 1 for axis in axes], axis=0)
    return np.rint(context_bytes(gpu) + COMMUNICATOR * communicators).astype(np.int64)


def slack(model: ModelSpec, table: PlanTable, found: MemoryTable) -> tuple[Column, Column]:
    """Bytes that the allocator holds beside the live tensors at its own peak: (what it cannot give back, what it gives back when memory
    runs out).

    Before it fails, the caching allocator frees whole unused segments and asks again (c10/cuda/CUDACachingAllocator.cpp): blocks of other
    pools and
    cached segments go, holes in segments that are in use stay.
    """
    b = found.breakdown
    live = (found.peak_bytes - b["framework"]).astype(np.float64)
    pooled = np.maximum(found.extra.get("pooled_bytes", live) - live, 0)
    moving = (b["activations"] + b["logits"] + b["communication_buffers"]).astype(np.float64)
    moving = moving * by_row(table, lambda s: EXPANDABLE if dict(s.options).get("expandable_segments") else 1.0)
    if model.is_moe:  # sizes that change with the routing: all of it is holes, compiled or not
        return FRAGMENTS * moving, pooled + CACHED
    moving = moving * by_row(table, lambda s: not s.compile)  # a compiled block plans its own buffers
    return HOLES * moving, (FRAGMENTS - HOLES) * moving + pooled + CACHED


# ---- host and disk

# DeepSpeed's own factor for buffers and the rounding of pinned memory (deepspeed/runtime/zero/stage3.py
# estimate_zero3_model_states_mem_needs).
PINNED = 1.5
# Interpreter, libraries, pinned staging and data loader workers of one process.
PROCESS = 3 * GB
# Staging of NVMe offload: buffer_count 5 x buffer_size 1e8 elements of fp32 (deepspeed/runtime/zero/offload_config.py).
STAGING = 5 * 1e8 * 4


def by_row(table: PlanTable, value: Callable[[Structure], float]) -> Column:
    """A column of what each plan's structure says."""
    return np.array([value(s) for s in table.structures], dtype=np.float64)[table.structure]


HOST_PHASES = ("load", "init", "train", "save")


def host_bytes(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, found: MemoryTable) -> dict[str, IntColumn]:
    """RAM of one node by `HOST_PHASES`.

    Load: frameworks that build the whole model in every process (DDP, ZeRO below 3) hold a 16-bit copy a rank, the others one a node. Init: the copy is
    still there; DeepSpeed makes all states that live on the host at once (`initialize_optimizer_states`), PyTorch's optimizers make theirs in the first
    step. Train: what is offloaded. Save: FSDP1 gathers a full state dict of the stored type on rank 0, DeepSpeed and DDP the 16-bit weights; Megatron and
    FSDP2 write shards.
    """
    ranks = np.minimum(cluster.gpus_per_node, table.gpus).astype(np.float64)
    process = PROCESS * ranks
    copies = by_row(table, _loads_whole)
    load = process + 2.0 * model.parameters * np.where(copies > 0, ranks, 1.0)
    moved = found.extra.get("offloaded_bytes", np.zeros(len(table), np.int64)).astype(np.float64)
    nvme = by_row(table, lambda s: s.offload.endswith("nvme"))
    deepspeed = by_row(table, lambda s: s.framework == "deepspeed") > 0
    train = process + ranks * np.where(nvme > 0, STAGING, moved * np.where(deepspeed, PINNED, 1.0))
    save = process + model.parameters * by_row(table, lambda s: _saved_whole(job, s))
    phases = load, np.where(deepspeed, np.maximum(load, train), load), train, save
    return {name: np.rint(column).astype(np.int64) for name, column in zip(HOST_PHASES, phases, strict=True)}


def _saved_whole(job: TrainingJob, s: Structure) -> float:
    """Bytes of a weight that rank 0 gathers to save."""
    if s.framework == "fsdp1":
        return float(dtypes(FRAMEWORKS["fsdp1"], job, s, alone=False).stored)
    return 0.0 if s.framework in ("megatron", "fsdp2") else 2.0


def _loads_whole(s: Structure) -> float:
    return float(s.framework == "ddp" or (s.framework == "deepspeed" and s.sharding != "zero3"))


def nvme_bytes(cluster: ClusterSpec, table: PlanTable, found: MemoryTable) -> IntColumn:
    """Disk of one node for states that live there."""
    ranks = np.minimum(cluster.gpus_per_node, table.gpus)
    moved = found.extra.get("offloaded_bytes", np.zeros(len(table), np.int64))
    return np.where(by_row(table, lambda s: s.offload.endswith("nvme")) > 0, moved * ranks, 0).astype(np.int64)
