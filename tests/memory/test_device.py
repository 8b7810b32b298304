"""From live tensors to reserved and device memory, host and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainwright.cost.device import COMMUNICATOR, HOST_PHASES, context_bytes, finish, framework_bytes
from trainwright.cost.ledger import memory_rows
from trainwright.cost.memory_table import MemoryTable
from trainwright.cost.table import PlanTable
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan, Structure

MODEL = build_model(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "llama-2-7b",
)  # fmt: skip
JOB = TrainingJob(2048, 8, master_weights="fp32", gradient_dtype="bf16")


def gpu(arch: str = "8.0", units: int = 108, capacity_bytes: int = 81920 * 2**20) -> GpuSpec:
    return GpuSpec(
        "gpu", (), "NVIDIA", "SXM", arch, units, {"bf16": 1e15}, 80, capacity_bytes, "HBM", 2e12, "NVLink", 3e11, 8, 8, 200, 3e10, 400
    )


def cluster(device: GpuSpec | None = None) -> ClusterSpec:
    return ClusterSpec(device or gpu(), 1, 8, 8, 25e9)


def plan(**given: Any) -> ParallelPlan:
    numbers = {k: given.pop(k) for k in ("dp_replicate", "dp_shard", "tp", "pp", "micro_batch_size") if k in given}
    return ParallelPlan(Structure(**given), **numbers)


def whole(layout: ParallelPlan, device: GpuSpec | None = None, job: TrainingJob = JOB) -> MemoryTable:
    table, where = PlanTable.from_plans([layout]), cluster(device)
    return finish(MODEL, where, job, table, memory_rows(MODEL, where, job, layout.structure, table))


def test_a_context_is_between_a_third_and_one_and_a_half_gigabytes():
    """nvidia-smi of a process after its first steps: T4 about 0.45 GB, A100 0.5 to 0.8, H100 0.7 to 1.0."""
    t4, a100, h100 = (context_bytes(gpu(arch, units)) for arch, units in (("7.5", 40), ("8.0", 108), ("9.0", 132)))
    assert 0.35e9 < t4 < 0.6e9
    assert 0.5e9 < a100 < 0.85e9
    assert 0.7e9 < h100 < 1.05e9


def test_each_mesh_axis_has_a_communicator():
    layouts = [
        plan(framework="megatron", sharding="zero1", **d) for d in ({}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"tp": 2, "pp": 4})
    ]
    found = framework_bytes(gpu(), PlanTable.from_plans(layouts))
    assert np.diff(found).tolist() == [COMMUNICATOR, COMMUNICATOR, 0]


def test_the_three_numbers_are_in_order():
    found = whole(plan(framework="deepspeed", sharding="zero3", dp_shard=8, recompute="full"))
    live = found.peak_bytes[0] - found.breakdown["framework"][0]
    assert live < found.reserved_bytes[0] < found.device_bytes[0]
    assert found.device_bytes[0] - found.reserved_bytes[0] == found.breakdown["framework"][0]
    assert found.peak_bytes[0] == sum(int(c[0]) for c in found.breakdown.values())


def test_cached_blocks_never_make_a_plan_fail_and_live_tensors_always_do():
    """Shrinking the card: the plan fits down to what it needs, is exactly as large as the card for a while, and then does not fit."""
    layout = plan(framework="deepspeed", sharding="zero3", dp_shard=8, recompute="full")
    free = whole(layout, gpu(capacity_bytes=10**12))
    live = int(free.peak_bytes[0])
    verdicts = []
    for capacity in np.linspace(0.97 * live, 1.05 * int(free.device_bytes[0]), 60).astype(int):
        device = int(whole(layout, gpu(capacity_bytes=int(capacity))).device_bytes[0])
        assert device <= max(int(free.device_bytes[0]), int(capacity))
        if capacity < live:
            assert device > capacity
        verdicts.append(device <= capacity)
    assert verdicts == sorted(verdicts)
    assert verdicts[-1]
    assert not verdicts[0]


def test_expandable_segments_leave_fewer_holes():
    layout = plan(framework="deepspeed", sharding="zero3", dp_shard=8, recompute="full", micro_batch_size=4)
    grown = replace(layout, structure=replace(layout.structure, options=(("expandable_segments", True),)))
    fixed, expandable = whole(layout), whole(grown)
    assert expandable.peak_bytes[0] == fixed.peak_bytes[0]
    assert expandable.reserved_bytes[0] < fixed.reserved_bytes[0]


def test_frameworks_that_build_the_model_in_every_process_hold_a_copy_a_rank():
    """Eight processes of DDP each load 2 bytes a parameter into host memory; ZeRO-3 and FSDP one a node."""
    ddp = whole(plan(framework="ddp", sharding="none", dp_replicate=8)).host_bytes_per_node[0]
    fsdp = whole(plan(framework="fsdp2", sharding="zero3", dp_shard=8)).host_bytes_per_node[0]
    assert ddp - fsdp == pytest.approx(7 * 2 * MODEL.parameters, rel=1e-6)


def test_host_memory_is_told_by_moment():
    """DeepSpeed makes offloaded states as it starts, PyTorch in the first step; the largest moment is what a node needs."""
    deepspeed = whole(plan(framework="deepspeed", sharding="zero3", dp_shard=8, offload="optimizer-cpu"))
    fsdp2 = whole(plan(framework="fsdp2", sharding="zero3", dp_shard=8, offload="params-cpu"))
    for found in (deepspeed, fsdp2):
        moments = {name: int(found.extra[f"host_{name}"][0]) for name in HOST_PHASES}
        assert found.host_bytes_per_node[0] == max(moments.values())
        assert moments["train"] > moments["load"]
    assert deepspeed.extra["host_init"][0] == deepspeed.extra["host_train"][0]
    assert fsdp2.extra["host_init"][0] == fsdp2.extra["host_load"][0]


def test_fsdp1_gathers_a_full_state_dict_to_save_it():
    fsdp1 = whole(plan(framework="fsdp1", sharding="zero3", dp_shard=8)).host_bytes_per_node[0]
    fsdp2 = whole(plan(framework="fsdp2", sharding="zero3", dp_shard=8)).host_bytes_per_node[0]
    assert fsdp1 - fsdp2 == pytest.approx(2 * MODEL.parameters, rel=1e-6)  # 4 bytes a parameter instead of the 2 of loading


def test_zero_infinity_needs_what_deepspeed_says():
    """Parameters and optimizer on the host: 18 bytes a parameter x 1.5 in DeepSpeed's own estimate (with fp32 gradients), 16 x 1.5 with
    bf16 ones.
    """
    found = whole(plan(framework="deepspeed", sharding="zero3", dp_shard=8, offload="params-cpu"))
    assert found.host_bytes_per_node[0] - 8 * 3e9 == pytest.approx(1.5 * 16 * MODEL.parameters, rel=1e-3)


def test_disk_holds_what_the_host_does_not():
    layout = plan(framework="deepspeed", sharding="zero3", dp_shard=8, offload="optimizer-nvme")
    disk, host = whole(layout), whole(replace(layout, structure=replace(layout.structure, offload="optimizer-cpu")))
    assert disk.nvme_bytes_per_node[0] == pytest.approx(14 * MODEL.parameters, rel=1e-3)  # masters 4, states 8, gradients 2
    assert host.nvme_bytes_per_node[0] == 0
    assert disk.host_bytes_per_node[0] < host.host_bytes_per_node[0]


def test_a_paged_optimizer_lives_on_the_host():
    layout = plan(framework="ddp", sharding="none")
    device = whole(layout, job=replace(JOB, optimizer="adam8bit"))
    paged = whole(layout, job=replace(JOB, optimizer="paged_adam8bit"))
    assert paged.states["optimizer"][0] == 0
    assert device.states["optimizer"][0] == pytest.approx(2 * (1 + 4 / 256) * MODEL.parameters, rel=1e-6)
    assert paged.extra["offloaded_bytes"][0] == device.states["optimizer"][0]
