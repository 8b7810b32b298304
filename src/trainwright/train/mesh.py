"""The ranks of a run as one grid, (pp, dp_replicate, dp_shard, cp, tp), tensor parallelism innermost: the plan's own degrees, no others."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import SpecError
from ..spec.plan import ParallelPlan
from .device import Machine
from .settings import Settings

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process's place. `data`: the axes over which gradients are summed (replicas, shards, context), as one group."""

    plan: ParallelPlan
    machine: Machine
    mesh: DeviceMesh

    def size(self, axis: str) -> int:
        return self.mesh[axis].size()

    def rank(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    @cached_property
    def data(self) -> DeviceMesh:
        return self.mesh[("dp_replicate", "dp_shard", "cp")]._flatten("data")

    @cached_property
    def shards(self) -> DeviceMesh:
        """What FSDP shards over: dp_shard x cp, with a replicate dim before it for HSDP."""
        if self.size("dp_replicate") == 1 and self.size("cp") == 1:
            return self.mesh["dp_shard"]
        inner = self.mesh[("dp_shard", "cp")]._flatten("dp_shard_cp") if self.size("cp") > 1 else self.mesh["dp_shard"]
        if self.size("dp_replicate") == 1:
            return inner
        return self.mesh[("dp_replicate", "dp_shard_cp" if self.size("cp") > 1 else "dp_shard")]

    @cached_property
    def experts(self) -> DeviceMesh:
        """(pp, expert_replicate, expert_shard, ep): all axes but pp once more, cut into groups of ep neighbors that share the experts among them."""
        replicas, ep = self.size("dp_replicate"), self.plan.ep
        inner = self.size("dp_shard") * self.size("cp") * self.size("tp")
        if replicas * inner % ep:
            raise SpecError(f"{ep} groups of experts do not divide {replicas * inner} ranks", "strategy.ep", [inner])
        copies = (replicas, inner // ep) if inner % ep == 0 else (replicas * inner // ep, 1)
        names = ("pp", "expert_replicate", "expert_shard", "ep")
        return init_device_mesh(self.machine.kind, (self.size("pp"), *copies, ep), mesh_dim_names=names)

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are cut, or summed, over other ranks than the rest of the model."""
        return self.plan.ep > 1 or self.size("tp") > 1

    @cached_property
    def expert_data(self) -> DeviceMesh:
        """The ranks that hold the same experts, as one axis."""
        return self.experts[("expert_replicate", "expert_shard")]._flatten("expert_data")

    @cached_property
    def expert_shards(self) -> DeviceMesh:
        """What FSDP shards experts over, with a replicate dim before it for HSDP."""
        return (
            self.experts["expert_shard"]
            if self.experts["expert_replicate"].size() == 1
            else self.experts["expert_replicate", "expert_shard"]
        )

    @property
    def expert_uses(self) -> float:
        """What the sum of an expert's gradients over all of its ranks is divided by: every tensor rank brings its tokens, all the same tokens without
        sequence parallelism."""
        return float(self.data.size() * (1 if self.plan.structure.sequence_parallel else self.size("tp")))

    @property
    def replica(self) -> tuple[int, int]:
        """(which, of how many) data-parallel replicas reads its own sequences."""
        inner = self.size("dp_shard")
        return self.rank("dp_replicate") * inner + self.rank("dp_shard"), self.size("dp_replicate") * inner

    @property
    def world(self) -> int:
        return self.plan.gpus

    @property
    def first(self) -> bool:
        return dist.get_rank() == 0


def ranks_of(plan: ParallelPlan, machine: Machine) -> Ranks:
    """The grid over the process group that is open. Raises `SpecError` where the plan wants another number of processes."""
    if dist.get_world_size() != plan.gpus:
        raise SpecError(f"the plan is for {plan.gpus} processes, {dist.get_world_size()} run", "strategy", [dist.get_world_size()])
    shape = tuple(getattr(plan, axis) for axis in AXES)
    return Ranks(plan, machine, init_device_mesh(machine.kind, shape, mesh_dim_names=AXES))


@contextmanager
def process_group(machine: Machine, settings: Settings) -> Iterator[None]:
    """torchrun's process group with the run's timeout on every collective; closed whatever happens."""
    options = {"device_id": machine.device} if machine.kind == "cuda" else {}
    dist.init_process_group(machine.backend, timeout=datetime.timedelta(seconds=settings.timeout_s), **options)
    try:
        yield
    finally:
        dist.destroy_process_group()
