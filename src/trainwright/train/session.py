"""What one rank opens for a run and closes after it: the process groups, the trainer, data, checkpoints, metrics and the clock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..cost.flops import model_flops
from ..resolve import Run, resolve
from ..spec.run import validate
from .checkpoint import Checkpoints
from .data.batches import batches_of
from .data.tokens import open_tokens
from .device import Machine, choose
from .engines import engine_of
from .files import CHECKPOINTS, write_error
from .hang import Watch
from .loop import Loop, Outcome
from .mesh import ranks_of
from .metrics import Metrics, matmul_flops
from .parallelize import DTYPES
from .settings import Settings
from .survive import Agreement, Stop


@contextlib.contextmanager
def process_group(machine: Machine, rank: int, attempt: int, timeout_s: float) -> Iterator[None]:
    """The default group over torchrun's store. Each attempt has its own keys there: with the old ones, a rank that starts first would connect to the
    address of a process that has ended."""
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    more: dict[str, Any] = {"device_id": machine.device} if machine.kind == "cuda" else {}
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        machine.backend, store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=size, timeout=limit, **more
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def describe(run: Run, module: str = "") -> dict[str, Any]:
    """What a checkpoint says about its run; ``model`` and ``optimizer`` must be the same to load it, the rest is told."""
    m = run.model
    model = {
        "type": m.model_type,
        "layers": m.num_layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "vocabulary": m.vocab,
    }
    if module:
        model["module"] = module
    plan = {k: v for k, v in vars(run.plan).items() if k != "structure"}
    return {
        "model": model | {"experts": m.experts, "tied": m.tied},
        "optimizer": run.job.optimizer,
        "layout": plan | {"sharding": run.plan.structure.sharding},
        "spec": run.filled,
    }


@contextlib.contextmanager
def session(folder: Path, document: Mapping[str, Any], rank: int, attempt: int) -> Iterator[Callable[[], Outcome]]:
    """Yields the run as a call. Everything that can be wrong is raised before it as `SpecError` or `TrainwrightError`."""
    run, settings = resolve(validate(dict(document["spec"]))), Settings.from_dict(document["settings"])
    machine = choose(settings)
    if machine.kind == "cpu":
        torch.set_num_threads(int(document.get("threads") or 1))
    metrics = Metrics(folder, enabled=rank == 0, tensorboard=settings.tensorboard)
    stop = Stop(folder)
    stop.listen()
    watch = Watch(
        folder / "hang" / f"attempt-{attempt}",
        rank,
        run.plan.gpus,
        settings.timeout_s,
        lambda line: write_error(folder, rank, attempt, line, final=False, status=1),
    )
    with process_group(machine, rank, attempt, 2 * settings.timeout_s), contextlib.closing(metrics):
        ranks = ranks_of(run.plan, machine)
        control, saving = (dist.new_group(backend="gloo", group_desc=name) for name in ("agreement", "checkpoint"))
        tokens = open_tokens(document["tokens"], run.model.vocab)
        replica, replicas = ranks.replica
        batches = batches_of(tokens, run.job, run.model.vocab, seed=settings.seed, rank=replica, size=replicas)
        checkpoints = Checkpoints(folder / CHECKPOINTS, describe(run, settings.model_from), keep=settings.keep, group=saving)
        checkpoints.clean()
        if settings.resume and checkpoints.any():
            settings = replace(settings, init="")  # its weights are past
        trainer = engine_of(run, settings).trainer(run, settings, ranks, folder)
        loop = Loop(trainer, batches, checkpoints, settings, metrics, Agreement(control), stop, watch)
        loop.flops_per_step = model_flops(run.model, run.job)
        loop.peak_flops = peak_of(run, machine)
        if settings.resume:
            loop.resume(document.get("checkpoint"))
        metrics.tell("start", step=trainer.steps, steps=settings.steps, attempt=attempt, ranks=run.plan.gpus, device=machine.kind)
        for note in trainer.notes:
            metrics.tell("warning", step=trainer.steps, message=note)
        with profiler(folder / "traces" / f"rank-{rank:05d}.json", settings.profile) as around:
            yield lambda: loop.run(memory=trainer.memory, around=around)
        watch.stop()
        checkpoints.close()


@contextlib.contextmanager
def profiler(path: Path, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """torch.profiler over the second and third step, written when the third has ended; what to call after each step."""
    if not wanted:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as found:
        yield lambda step: found.step()


def peak_of(run: Run, machine: Machine) -> float:
    """FLOP/s of all devices: the catalogue's dense peak of the plan's GPU; on a CPU the matrix products measured just now, all ranks at once."""
    dtype = DTYPES.get(run.job.precision, torch.float32)
    if machine.kind == "cuda":
        return run.cluster.gpu.peak(run.job.precision) * run.plan.gpus
    total = torch.tensor([matmul_flops(machine.device, dtype)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
