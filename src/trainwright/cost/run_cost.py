"""The whole run: days, GPU-hours, dollars, energy, checkpoint interval, goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from .energy import PUE, energy_mwh, watts
from .goodput import Reliability, reliability
from .money import days, usd


@dataclass(frozen=True)
class RunCost:
    """`days` and what follows from it is time on the clock, failures and saves included; None where no number of tokens (or price) was said.

    `steps_days` is the same without lost time.
    """

    steps_days: float | None
    days: float | None
    gpu_hours: float | None
    usd: float | None
    price_source: str
    energy_mwh: float | None
    watts_per_gpu: float
    reliability: Reliability

    @property
    def goodput(self) -> float:
        return self.reliability.goodput

    @property
    def checkpoint_interval_s(self) -> float:
        return self.reliability.checkpoint_interval_s

    def to_dict(self) -> dict[str, Any]:
        """Contract section 4, ``run``."""
        r = self.reliability
        return {
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost_usd": self.usd,
            "energy_mwh": self.energy_mwh,
            "checkpoint_interval_s": r.checkpoint_interval_s,
            "goodput": r.goodput,
            "days_without_lost_time": self.steps_days,
            "checkpoint_bytes": int(r.checkpoint_bytes),
            "checkpoint_blocking_s": r.checkpoint_blocking_s,
            "mean_time_to_interruption_s": r.mean_time_to_interruption_s,
            "watts_per_gpu": self.watts_per_gpu,
            "pue": PUE,
            "price_source": self.price_source,
        }


def run_cost(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan, step_s: float) -> RunCost:
    """The run's figures for one plan whose step takes `step_s` seconds."""
    found = reliability(model, job, plan.structure, plan.gpus)
    on_the_clock = days(job, step_s, found.goodput)
    hours = None if on_the_clock is None else on_the_clock * 24 * plan.gpus
    return RunCost(
        steps_days=days(job, step_s),
        days=on_the_clock,
        gpu_hours=hours,
        usd=usd(cluster, hours),
        price_source=cluster.price_source,
        energy_mwh=None if hours is None or not watts(cluster.gpu) else energy_mwh(cluster.gpu, hours),
        watts_per_gpu=watts(cluster.gpu),
        reliability=found,
    )
