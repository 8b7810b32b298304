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
        """(pp, expert_replica, ep, tp): the data axes once more, cut into groups of ep neighbors that share the experts among them."""
        size = self.size("dp_replicate") * self.size("dp_shard") * self.size("cp")
        ep = self.plan.ep
        if size % ep:
            raise SpecError(f"{ep} groups of experts do not divide {size} data-parallel ranks", "strategy.ep", [size])
        shape = (self.size("pp"), size // ep, ep, self.size("tp"))
        return init_device_mesh(self.machine.kind, shape, mesh_dim_names=("pp", "expert_replica", "ep", "tp"))

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
