"""What the search asks of the equations: does it fit, how fast at best, how fast exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..cost.table import Column, IntColumn, PlanTable, merged
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .bounds import Bounds, least_moved_bytes
from .rules import Case

GB = 10**9


@dataclass(frozen=True)
class Need:
    """Columns of bytes: what a plan needs of a card (what something else holds included), of a node's RAM and of its disks."""

    device: IntColumn
    host: IntColumn
    nvme: IntColumn


class Least(Protocol):
    """What plans of a table need of a card at least."""

    def least(self, structures: tuple[Structure, ...], rows: NDArray[np.intp]) -> Column:
        """Bytes, of these rows, each with the structure that stands here in place of the table's own."""


class Pricing(Protocol):
    """The equations for one model, cluster and job. `screen` never exceeds `exact`, `bounds(...).least` never exceeds ``need(...).device``,
    `outlined` never exceeds `at_least`, which knows what activation offload moves, and that never exceeds `screen`.

    `need` is exact up to `limit` bytes of a card; of a plan beyond it may say less than it needs, but never less than the limit.
    `outline` are columns that do not depend on offload."""

    def bounds(self, table: PlanTable) -> Least: ...

    def outline(self, table: PlanTable) -> Mapping[str, Column]: ...

    def outlined(self, outline: Mapping[str, Column], table: PlanTable) -> Column: ...

    def at_least(self, outline: Mapping[str, Column], table: PlanTable) -> Column: ...

    def need(self, table: PlanTable, limit: int | None = None) -> Need: ...

    def screen(self, table: PlanTable) -> Column: ...

    def exact(self, table: PlanTable) -> tuple[Column, Mapping[str, Column]]:
        """Seconds of a step, and the parts that they are the sum of."""


@lru_cache(maxsize=4096)
def _stays(s: Structure) -> Structure:
    return replace(s, offload="none")


@dataclass(frozen=True)
class Equations:
    """The package's own: `cost.memory`, `cost.step.screen`, `cost.step.exact`."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    factor: float = 1.0  # a calibrated profile's, on every step time

    def bounds(self, table: PlanTable) -> Least:
        return Bounds(Case(self.model, self.cluster, self.job), table)

    def outline(self, table: PlanTable) -> Mapping[str, Column]:
        from ..cost.outline import outline

        return outline(self.model, self.cluster, self.job, table)

    def outlined(self, outline: Mapping[str, Column], table: PlanTable) -> Column:
        from ..cost.step import screen_of_parts

        return self.factor * screen_of_parts(outline, self.cluster, self.job, table, np.zeros(len(table)))

    def at_least(self, outline: Mapping[str, Column], table: PlanTable) -> Column:
        from ..cost.step import screen_of_parts

        moved = least_moved_bytes(Case(self.model, self.cluster, self.job), table)
        return self.factor * screen_of_parts(outline, self.cluster, self.job, table, moved)

    def need(self, table: PlanTable, limit: int | None = None) -> Need:
        from ..cost.memory import memory

        found = memory(self.model, self.cluster, self.job, table, limit)
        reserved = np.array([round(s.reserved_gb * GB) for s in table.structures], dtype=np.int64)[table.structure]
        return Need(found.device_bytes + reserved, found.host_bytes_per_node, found.nvme_bytes_per_node)

    def screen(self, table: PlanTable) -> Column:
        """Plans that differ in offload only are priced once."""
        from ..cost.once import saved_bytes
        from ..cost.outline import screened
        from ..cost.step import screen_of_parts

        made = (self.model, self.cluster, self.job)
        parts = screened(*made, merged(table, _stays))
        saved = np.zeros(len(table))
        moves = np.flatnonzero(np.array([s.offload == "activations-cpu" for s in table.structures], dtype=bool)[table.structure])
        if len(moves):
            saved[moves] = saved_bytes(*made, table.take(moves))
        return self.factor * screen_of_parts(parts, self.cluster, self.job, table, saved)

    def exact(self, table: PlanTable) -> tuple[Column, Mapping[str, Column]]:
        from ..cost.step import exact
        from ..cost.traffic import traffic

        found = exact(self.model, self.cluster, self.job, table, traffic(self.model, self.cluster, self.job, table))
        return self.factor * found.step_s, {k: self.factor * c for k, c in found.breakdown.items()}


def calibrated(measured_over_predicted: float) -> type[Equations]:
    """The equations with every step time multiplied by a profile's factor."""

    @dataclass(frozen=True)
    class Calibrated(Equations):
        factor: float = measured_over_predicted

    return Calibrated


def resized(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The same kind of cluster with another number of GPUs: whole nodes where they divide, else the largest part of a node that does."""
    size = next(n for n in range(min(cluster.gpus_per_node, gpus), 0, -1) if gpus % n == 0)
    return replace(cluster, nodes=gpus // size, gpus_per_node=size)


def fits(need: Need, cluster: ClusterSpec, margin: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(inside the card with `margin` of it kept free, inside the card); both inside the node's RAM and disks where their sizes are known."""
    around = np.ones(len(need.device), dtype=bool)
    if cluster.host_memory_bytes is not None:
        around &= need.host <= cluster.host_memory_bytes
    if cluster.nvme_bytes is not None:
        around &= need.nvme <= cluster.nvme_bytes
    capacity = cluster.gpu.capacity_bytes
    return around & (need.device <= capacity * (1 - margin)), around & (need.device <= capacity)
