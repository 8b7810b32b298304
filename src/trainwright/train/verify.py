"""Runs a plan and layouts like it on this machine and holds them against their estimates. Needs torch in the processes that it starts, not in this one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..measure.layouts import layouts, name_of
from ..measure.machine import Machine, machine_of
from ..measure.real import RealRow, RealVerification, loss_rows, message_rows, time_rows
from ..resolve import Run, resolve
from ..spec.run import validate
from .engines import NATIVE, engine_of
from .ranks import run_ranks
from .scope import require_torch
from .settings import Settings

if TYPE_CHECKING:
    from ..cost.estimate import Estimate

MOST_CPU_RANKS = 8
STEPS = 3
LONGEST_S = 900.0  # of one run of all ranks
CORE_FLOPS = 1e11  # a core's fp32 at best: two AVX2 products and sums of 8 numbers a cycle at 3 GHz

Estimator = Callable[[dict[str, Any], tuple[str, ...]], "Estimate"]  # a run spec and more catalogue files -> its estimate


def hardware() -> tuple[str, int, int]:
    """(cuda or cpu, ranks that this machine has devices for, threads of each): one rank a GPU, or one a core and at most 2 x that."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ("cuda", gpus, max(1, cores // gpus)) if gpus else ("cpu", cores, 1)


def measure_machine(ranks: int | None = None, dtypes: Sequence[str] = ("fp32", "bf16"), thorough: bool = False) -> Machine:
    """This machine with `ranks` ranks at work (all GPUs, or one a core). Raises `TorchMissing` without torch, `SpecError` for more ranks than devices."""
    import time

    require_torch()
    kind, most, _ = hardware()
    count = most if ranks is None else ranks
    limit = most if kind == "cuda" else max(MOST_CPU_RANKS, most)
    if not 1 <= count <= limit:
        raise SpecError(f"{count} ranks are not between 1 and this machine's {limit}", "--ranks", [limit])
    threads = max(1, most // count) if kind == "cpu" else 1
    start = time.perf_counter()
    request = {"device": kind, "dtypes": list(dtypes), "thorough": thorough}
    raw = run_ranks("trainwright.train.measure_machine", request, count, LONGEST_S, threads)
    return machine_of(raw, base=_known(raw["device"]["name"]) if kind == "cuda" else None, seconds=time.perf_counter() - start)


def _known(name: str) -> Any:
    """The catalogue's GPU of that name, None where it has none."""
    from ..catalog.gpus import load_gpu

    try:
        return load_gpu(name)
    except SpecError:
        return None


def here(document: Mapping[str, Any], machine_id: str, gpus: int) -> dict[str, Any]:
    """The run spec on this machine's devices."""
    return {**document, "cluster": {"gpu": machine_id, "nodes": 1, "gpus_per_node": gpus}}


def require_room(run: Run) -> None:
    """Raises `SpecError` where the plan has more ranks than this machine has room for, or a step takes longer than a run may."""
    kind, most, _ = hardware()
    limit = most if kind == "cuda" else max(MOST_CPU_RANKS, most)
    only_fake = ["trainwright verify --memory"]
    if run.plan.gpus > limit:
        raise SpecError(
            f"the plan has {run.plan.gpus} ranks, this machine room for {limit}: only its memory and messages can be held against PyTorch here",
            "cluster",
            only_fake,
        )
    least_s = 6 * run.model.active_parameters * run.job.tokens_per_step / (most * CORE_FLOPS) if kind == "cpu" else 0.0
    if least_s > LONGEST_S:
        together = run.plan.dp * run.plan.micro_batch_size
        room = int(run.job.global_batch_size * LONGEST_S / least_s) // together * together
        raise SpecError(
            f"one step of {run.job.tokens_per_step:,} tokens takes at least {least_s / 60:,.0f} minutes on these {most} cores",
            "training.global_batch_size",
            [*only_fake, *([f"a batch of {room}"] if room else [])],
        )


def require_engine(run: Run) -> None:
    """Raises `SpecError` for a plan that PyTorch's own wrappers do not run: what would run here would be another."""
    settings = Settings()
    engine = engine_of(run, settings)
    if engine.name != NATIVE:
        raise SpecError(
            f"only PyTorch's own wrappers are held against their plan, not {engine.title}, whose steps `trainwright train --engine {engine.name}` runs",
            "strategy.framework",
            ["fsdp2", "ddp"],
        )
    engine.check(run, settings, hardware()[0] == "cuda")


class Real:
    """One plan on this machine."""

    def __init__(self, document: Mapping[str, Any], estimate: Estimator, machine: Machine, catalog_files: tuple[str, ...]) -> None:
        self.machine, self.files, self.predict = machine, catalog_files, estimate
        planned = resolve(validate(dict(document)), catalog_files)
        self.gpus = planned.plan.gpus
        self.kind, _, _ = hardware()
        self.document = {**planned.filled, "model": document["model"]}
        self.run = planned

    def _ranks(self, documents: list[dict[str, Any]], gpus: int, **request: Any) -> list[dict[str, Any]]:
        threads = max(1, hardware()[1] // gpus) if self.kind == "cpu" else 1
        asked = {"documents": documents, "catalog_files": list(self.files), "device": self.kind, **request}
        return list(run_ranks("trainwright.train.measure_runs", asked, gpus, LONGEST_S, threads))

    def messages_and_losses(self) -> list[RealRow]:
        """Losses and gradients of the layout in fp32 against one device, and the collectives of a step of the plan itself against its estimate."""
        single = here(alone(self.document), self.machine.id, 1)
        wide = here(in_fp32(self.document), self.machine.id, self.gpus)
        with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
            kept = str(Path(folder) / "gradients")
            one = self._ranks([single], 1, losses=STEPS, reference=True, kept=kept, clip=0.0)[0]
            many = self._ranks([wide], self.gpus, losses=STEPS, reference=False, kept=kept, clip=0.0)[0]
        mine = here(self.document, self.machine.id, self.gpus)
        sent = self._ranks([mine], self.gpus, messages=True)[0]
        for found in (one, many, sent):
            if "error" in found:
                raise SpecError(found["error"], "strategy")
        return [*loss_rows(one, many), *message_rows(self.estimate(mine), sent["messages"])]

    def times(self, every: bool, rounds: int) -> tuple[list[RealRow], dict[str, float], list[str]]:
        """Step times of the plan, and with `every` of each layout of `measure.layouts` that this model can have."""
        chosen = [dict(self.document["strategy"])]
        if every:
            same = {"attention": chosen[0].get("attention", "flash")}
            chosen += [{**s, **same} for s in layouts(self.gpus, self.run.job.global_batch_size) if name_of(s) != name_of(chosen[0])]
        documents, estimates, skipped = [], [], []
        for strategy in chosen:
            document = here({**self.document, "strategy": strategy}, self.machine.id, self.gpus)
            try:
                estimates.append(self.estimate(document))
                documents.append(document)
            except SpecError as error:
                skipped.append(f"{name_of(strategy)}: {error}")
        found = self._ranks(documents, self.gpus, rounds=rounds)
        names = [name_of(d["strategy"]) for d in documents]
        skipped += [f"{n}: {f['error']}" for n, f in zip(names, found) if "error" in f]
        rows, summary = time_rows(names, estimates, found, self.machine.pulse_s)
        return rows, summary, skipped

    def estimate(self, document: dict[str, Any]) -> Estimate:
        return self.predict(document, self.files)


def in_fp32(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same job and layout in fp32, where layouts can be compared to the last digits."""
    training = {**document["training"], "precision": "fp32", "master_weights": "none", "gradient_dtype": "fp32", "autocast": False}
    training.pop("fp8_recipe", None)
    return {**document, "training": training}


def alone(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same job in fp32 on one device."""
    wide = in_fp32(document)
    loss = "plain" if wide["training"].get("loss") == "vocab-parallel" else wide["training"].get("loss", "plain")
    strategy = {
        "framework": "ddp",
        "sharding": "none",
        "dp": 1,
        "micro_batch_size": 1,
        "attention": document["strategy"].get("attention", "flash"),
    }
    return {**wide, "training": {**wide["training"], "loss": loss}, "strategy": strategy}


def verify_real(
    document: Mapping[str, Any],
    estimate: Estimator,
    *,
    machine: Machine | None = None,
    profile: str | None = None,
    catalog_files: tuple[str, ...] = (),
    exact: bool = True,
    times: bool = True,
    every_layout: bool = False,
    rounds: int = 4,
) -> RealVerification:
    """The plan run for real on this machine: `exact` (losses, gradients, collectives), `times` (steps, with `every_layout` those of other layouts too).

    `estimate` predicts; `machine` or `profile` (a file) say how fast this machine is; without either it is measured first.
    """
    require_torch()
    run = resolve(validate(dict(document)), catalog_files)
    require_room(run)
    require_engine(run)
    with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
        if profile is None:
            machine = machine or measure_machine(run.plan.gpus)
            path = Path(folder) / "machine.toml"
            path.write_text(machine.to_toml(), encoding="utf-8")
            profile = str(path)
        if machine is None:
            machine = _machine_in(profile)
        real = Real(document, estimate, machine, (*catalog_files, profile))
        rows: list[RealRow] = []
        summary: dict[str, float] = {}
        skipped: list[str] = []
        if exact:
            rows += real.messages_and_losses()
        if times:
            found, summary, skipped = real.times(every_layout, rounds)
            rows += found
        return RealVerification(tuple(rows), summary, str(machine.gpu.get("source", "")), tuple(skipped))


def _machine_in(profile: str) -> Machine:
    """The machine that a profile describes."""
    from ..catalog.user_files import read_user_catalog

    gpus = [g for g in read_user_catalog([profile]).gpus if "measured" in g]
    if not gpus:
        raise SpecError("describes no machine", profile, ["trainwright calibrate -o machine.toml"])
    return Machine(gpus[0], (), {}, 0.0)
