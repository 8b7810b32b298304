"""One table of plans, everything about it: memory, traffic, time, money. `estimate` is this table with one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from ..units import format_bytes, format_seconds
from .device import HOST_PHASES
from .flops import conventions, flops
from .memory import memory
from .memory_table import PHASES, MemoryTable
from .message import Message
from .run_cost import RunCost, run_cost
from .step import Settings, TimeTable, exact
from .table import PlanTable
from .traffic import traffic


@dataclass(frozen=True)
class EstimateTable:
    """The columns of every equation for the same plans, in the same order."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    plans: PlanTable
    memory: MemoryTable
    messages: list[Message]
    time: TimeTable

    def __len__(self) -> int:
        return len(self.plans)

    def row(self, i: int, spec: Mapping[str, Any], **said: tuple[str, ...]) -> Estimate:
        """Plan i as an `Estimate`; `spec` is its run spec, filled; `said` are reasons, warnings, assumed."""
        return Estimate(self, i, spec, **{**said, "warnings": (*said.get("warnings", ()), *self.over_budget(i))})

    def over_budget(self, i: int) -> tuple[str, ...]:
        """A node's RAM or disk that plan i needs more of than the cluster is known to have."""
        budgets = (
            ("host memory", self.memory.host_bytes_per_node, self.cluster.host_memory_bytes, "cluster.host_memory_gb"),
            ("NVMe", self.memory.nvme_bytes_per_node, self.cluster.nvme_bytes, "cluster.nvme_tb"),
        )
        return tuple(
            f"{where}: {what} of {format_bytes(int(need[i]))} a node is needed, and a node has {format_bytes(have)}"
            for what, need, have, where in budgets
            if have is not None and need[i] > have
        )


def evaluate(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plans: PlanTable, factor: float = 1.0) -> EstimateTable:
    """Memory and the exact pass of time for every row; `factor` is a calibrated profile's, on every step time."""
    messages = traffic(model, cluster, job, plans)
    time = exact(model, cluster, job, plans, messages, None if factor == 1.0 else Settings(factor=factor))
    return EstimateTable(model, cluster, job, plans, memory(model, cluster, job, plans), messages, time)


@dataclass(frozen=True)
class Estimate:
    """One fully specified run, answered. `to_dict` is the JSON of the contract; everything else reads from the same columns.

    Bytes are whole numbers, times seconds, money US dollars. Bandwidths, conventions and units as documented there.
    """

    table: EstimateTable
    index: int
    spec: Mapping[str, Any]
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line: the whole model would be pages of a notebook."""
        card = f"{format_bytes(self.needed_bytes)} of {format_bytes(self.capacity_bytes)}"
        answer = f"{format_seconds(self.step_s)} a step, {card}, verdict {self.verdict}"
        return f"<Estimate {self.model.name} on {self.plan.gpus} x {self.cluster.gpu.id}: {self.plan}: {answer}>"

    @property
    def model(self) -> ModelSpec:
        return self.table.model

    @property
    def cluster(self) -> ClusterSpec:
        return self.table.cluster

    @property
    def job(self) -> TrainingJob:
        return self.table.job

    @cached_property
    def plan(self) -> ParallelPlan:
        return self.table.plans.plan(self.index)

    @property
    def step_s(self) -> float:
        return float(self.table.time.step_s[self.index])

    @property
    def peak_bytes(self) -> int:
        return int(self.table.memory.peak_bytes[self.index])

    @property
    def device_bytes(self) -> int:
        return int(self.table.memory.device_bytes[self.index])

    @property
    def capacity_bytes(self) -> int:
        return self.cluster.gpu.capacity_bytes

    @property
    def needed_bytes(self) -> float:
        """Device memory and what the strategy says is reserved for something else."""
        return self.device_bytes + self.plan.structure.reserved_gb * 1e9

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` (only inside the memory margin) or ``no``."""
        if not self.fits:
            return "no"
        return "fits" if self.needed_bytes <= self.capacity_bytes * (1 - self.cluster.memory_margin) else "tight"

    @cached_property
    def flops(self) -> Mapping[str, float]:
        """{"model": forward + backward of the whole step, "hardware": with recomputation}, all GPUs together."""
        found = flops(self.model, self.job, self.table.plans)
        return {"model": float(found.model[self.index]), "hardware": float(found.hardware[self.index])}

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens_per_step / self.step_s

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s of the compute type on one GPU: the denominator of MFU."""
        return self.cluster.gpu.peak(self.job.precision)

    def _rate(self, flops_per_step: float) -> float:
        return flops_per_step / self.step_s / self.plan.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs (causal attention counted as half) over the dense peak of the compute type."""
        return self._rate(self.flops["model"]) / self.peak_flops

    @property
    def hfu(self) -> float:
        return self._rate(self.flops["hardware"]) / self.peak_flops

    def flops_convention(self, name: str) -> dict[str, float]:
        """Another convention of FLOPs a step: ``megatron`` (arXiv:2104.04473 formula, recomputation included), ``palm`` (6N + 12LHQT), ``6N``."""
        per_step = conventions(self.model, self.job, self.plan, name)
        rate = self._rate(per_step)
        return {"flops_per_step": per_step, "tflops_per_gpu": rate / 1e12, "mfu": rate / self.peak_flops}

    @cached_property
    def cost(self) -> RunCost:
        """Days, GPU-hours, dollars, energy, checkpoints and goodput of the whole run."""
        return run_cost(self.model, self.cluster, self.job, self.plan, self.step_s)

    def memory_dict(self) -> dict[str, Any]:
        m, i = self.table.memory, self.index
        column = lambda c: int(c[i])  # noqa: E731
        return {
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "pipeline_rank": column(m.pipeline_rank),
            "breakdown": {k: column(c) for k, c in m.breakdown.items()},
            "states": {k: column(c) for k, c in m.states.items()},
            "saved_bytes": column(m.saved_bytes),
            "phases": {k: column(c) for k, c in m.phases.items()},
            "peak_phase": PHASES[column(m.peak_phase)],
            "peak_moment": m.moment(i),
            "reserved_bytes": column(m.reserved_bytes),
            "device_bytes": column(m.device_bytes),
            "host_bytes_per_node": column(m.host_bytes_per_node),
            "host_phases": {name: column(m.extra[f"host_{name}"]) for name in HOST_PHASES},
            "nvme_bytes_per_node": column(m.nvme_bytes_per_node),
            "verdict": self.verdict,
            "interval_80_bytes": [int(x) for x in memory_interval(m, i)],
        }

    def communication(self) -> list[dict[str, Any]]:
        """Every collective of a step: group, kind, payload of the whole step, calls, seconds, exposed seconds."""
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        time, i = self.table.time, self.index
        for k, message in enumerate(self.table.messages):
            calls = int(message.calls[i])
            if not calls:
                continue
            row = found.setdefault(
                (message.axis, message.collective, message.what),
                {"group": message.axis, "collective": message.collective, "what": message.what, "ranks": int(message.ranks[i])}
                | {"bytes_per_rank": 0, "count": 0, "seconds": 0.0, "exposed_s": 0.0},
            )
            row["bytes_per_rank"] += int(message.bytes_per_call[i]) * calls
            row["count"] += calls
            row["seconds"] += float(time.message_seconds[k][i])
            row["exposed_s"] += float(time.exposed_seconds[k][i])
        return list(found.values())

    def messages_of(self, rank: int) -> list[Message]:
        """What the rank at place `rank` of the pipeline sends in a step, columns of one plan."""
        return traffic(self.model, self.cluster, self.job, self.table.plans.take(np.array([self.index])), np.array([rank]))

    def sent_by(self, rank: int, least_bytes: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
        """{(axis, collective): (bytes, calls)} of a step of one rank at place `rank` of its pipeline, as this project's trainer runs the plan: it sums a
        replicated gradient once, whatever optimizer reads it. All data axes are ``dp``; what goes over all ranks is ``world``, but for a pipeline's."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        once = replace(self.job, optimizer_kernel="fused")
        row = self.table.plans.take(np.array([self.index]))
        for message in traffic(self.model, self.cluster, once, row, np.array([rank])):
            calls = int(message.calls[0])
            if not calls or message.bytes_per_call[0] < least_bytes:
                continue
            axis = "dp" if message.axis.startswith("dp") else message.axis
            key = "world" if message.ranks[0] == self.plan.gpus and axis != "pp" else axis, message.collective
            size, count = found.get(key, (0, 0))
            found[key] = size + calls * int(message.bytes_per_call[0]), count + calls
        return found

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the contract, section 4."""
        time, i, gpus = self.table.time, self.index, self.plan.gpus
        return {
            "spec": dict(self.spec),
            "fits": self.fits,
            "gpus": gpus,
            "parameters": {"total": self.model.parameters, "active": self.model.active_parameters},
            "memory": self.memory_dict(),
            "time": {
                "step_s": self.step_s,
                "breakdown": {k: float(c[i]) for k, c in time.breakdown.items()},
                "interval_80_s": [float(time.low_s[i]), float(time.high_s[i])],
            },
            "communication": self.communication(),
            "throughput": {
                "tokens_per_s": self.tokens_per_s,
                "tokens_per_s_per_gpu": self.tokens_per_s / gpus,
                "model_tflops_per_gpu": self._rate(self.flops["model"]) / 1e12,
                "mfu": self.mfu,
                "hfu": self.hfu,
            },
            "run": self.cost.to_dict(),
            "reasons": list(self.reasons),
            "warnings": [*self.warnings, *time.notes(i)],
            "assumed": list(self.assumed),
        }


def memory_interval(table: MemoryTable, i: int) -> tuple[int, int]:
    """[low, high] of the 80 % interval of device memory; engines put its ends into `extra`."""
    low, high = table.extra.get("interval_low"), table.extra.get("interval_high")
    device = int(table.device_bytes[i])
    return (int(low[i]) if low is not None else device, int(high[i]) if high is not None else device)
