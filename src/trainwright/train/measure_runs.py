"""Runs of several layouts on this machine, one after another in the same processes: seconds of a step, losses, gradients, bytes and calls of every collective.

Batches are random tokens of a seed, the same for every layout of a job. Layouts that are timed take turns, so that what else the machine does meets all of
them alike, and the shortest step of the slowest rank counts; so does the shortest pulse of a CPU, which is taken before each step.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..measure.real import SCALAR_BYTES
from ..resolve import Run, resolve
from ..spec.run import validate
from . import optimizer as optimizers
from .data.batches import Batch
from .device import choose
from .engines import ENGINES, NATIVE
from .mesh import Ranks, ranks_of
from .pulse import BEATS, Pulse
from .ranks import answer, joined
from .settings import Settings
from .step import Trainer
from .tracker import Tracker


def batch_of(run: Run, ranks: Ranks, seed: int) -> Batch:
    """This replica's sequences of the global batch."""
    generator = torch.Generator().manual_seed(seed)
    length, total = run.job.seq_len, run.job.global_batch_size
    every = torch.randint(0, run.model.vocab, (total, length + 1), generator=generator)
    which, of = ranks.replica
    mine = every[which * (total // of) : (which + 1) * (total // of)]
    positions = torch.arange(length).expand(len(mine), length)
    return Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions)


def slowest(work: Callable[[], object]) -> float:
    """Seconds on the clock of what all ranks begin together, until the last is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


class Layout:
    """One layout, built; `run` is what it was planned as."""

    def __init__(self, document: dict[str, Any], catalog_files: tuple[str, ...], settings: Settings) -> None:
        self.run = resolve(validate(document), catalog_files)
        self.settings = settings
        self.machine = choose(settings)
        ENGINES[NATIVE].check(self.run, settings, self.machine.kind == "cuda")
        self.ranks = ranks_of(self.run.plan, self.machine)
        self.trainer = Trainer(self.run, settings, self.ranks)

    def step(self, seed: int) -> tuple[float, float]:
        """(loss, seconds of the slowest rank)."""
        batch = batch_of(self.run, self.ranks, seed)
        loss = 0.0

        def once() -> None:
            nonlocal loss
            loss = self.trainer.step(batch).loss
            if self.machine.kind == "cuda":
                torch.cuda.synchronize()

        seconds = slowest(once)
        return loss, seconds

    def memory(self) -> dict[str, int]:
        """Bytes that the allocator and the device hold; nothing on a CPU."""
        found = self.machine.allocated()
        return {} if found is None else dict(zip(("allocated", "reserved", "device"), found))


class Calls(Tracker):
    """Collectives of a step; what a trainer agrees on beside the plan counts as axis ``scalar``."""

    def message(self, axis: str, collective: str, size: int, dtype: str, payload: int) -> None:
        super().message("scalar" if payload <= SCALAR_BYTES else axis, collective, size, dtype, payload)


def messages(layout: Layout) -> list[list[list[Any]]]:
    """Of the first rank of every stage of the pipeline, what `sent` says of a step."""
    # A static DDP tells its ranks in its first step which weights are used, and of its new buckets in its third.
    for i in range(3):
        layout.step(i)
    mine = sent(layout.trainer, batch_of(layout.run, layout.ranks, 1))
    everyone: list[Any] = [None] * layout.ranks.world
    dist.all_gather_object(everyone, mine)
    return everyone[:: layout.ranks.world // layout.ranks.size("pp")]


def sent(trainer: Trainer, batch: Batch) -> list[list[Any]]:
    """[axis, collective, bytes of the whole payload, calls] of one step of this rank."""
    tracker = Calls()
    tracker.axes = axes_of(trainer)
    with tracker:
        trainer.step(batch)
    found: dict[tuple[str, str], list[int]] = {}
    for (axis, kind, size, _, _), (count, payload) in tracker.messages.items():
        if size != 1:
            entry = found.setdefault((axis, kind), [0, 0])
            entry[0] += payload
            entry[1] += count
    return [[*key, *value] for key, value in sorted(found.items())]


def axes_of(trainer: Trainer) -> dict[str, tuple[str, int]]:
    """{name of a process group: (mesh axis, its size)}. The flattened data axes count as dp, those of experts too; one over all ranks, which axes share, is
    the ``world``. A pipeline's channels and pairs of ranks are groups of their own, its pp."""
    ranks = trainer.ranks
    found: dict[str, tuple[str, int]] = {}
    meshes = [ranks.mesh, ranks.data]
    if ranks.plan.structure.sharding in ("zero2", "zero3"):
        meshes.append(ranks.shards)
    if ranks.spreads_experts:
        meshes += [ranks.experts, ranks.expert_data]
    for mesh in meshes:
        for name in mesh.mesh_dim_names or ():
            group = mesh.get_group(name)
            axis = name if name in ("tp", "pp", "cp", "ep") else "dp"
            if group.size() > 1 or group.group_name not in found:
                found[group.group_name] = (axis, group.size())
    if trainer.pipeline is not None:
        pairs = [*trainer.pipeline.mail.groups.values(), *(group for group, _ in trainer.pipeline.pairs)]
        found |= {group.group_name: ("pp", 2) for group in pairs if isinstance(group, dist.ProcessGroup)}
    found[dist.group.WORLD.group_name] = ("world", dist.get_world_size())
    return {name: ("world" if size == dist.get_world_size() and axis != "pp" else axis, size) for name, (axis, size) in found.items()}


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole gradients by name of the parameters that this rank holds, before they are clipped."""
    found = {}
    for name, p in trainer.named:
        optimizers.settle(p)
        if p.grad is not None:
            found[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().clone()
    return found


def learn(layout: Layout, steps: int, kept: Path, reference: bool) -> dict[str, Any]:
    """Losses of the first steps, and the first step's gradients: written by the reference, compared by the others."""
    seen: dict[str, torch.Tensor] = {}
    update = layout.trainer._update

    def first(*args: Any) -> Any:
        if not seen:
            seen.update(gradients(layout.trainer))
        return update(*args)

    layout.trainer._update = first  # type: ignore[method-assign]
    losses = [layout.step(10 + i)[0] for i in range(steps)]
    if reference:
        torch.save(seen, kept)
        return {"losses": losses}
    whole = torch.load(kept, weights_only=True)
    worst = torch.zeros(2, dtype=torch.float64)
    for name, g in seen.items():
        if name in whole and whole[name].shape == g.shape:
            worst[0] = max(worst[0], (whole[name] - g).abs().max().double())
            worst[1] += 1
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"losses": losses, "gradient_difference": float(worst[0]), "gradients": int(worst[1])}


def work(folder: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a layout: ``error`` where this machine could not run it, else what was asked for of ``losses``, ``messages``, ``seconds``, ``memory``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    settings = Settings(steps=1000, learning_rate=1e-3, warmup_steps=0, clip=request.get("clip", 1.0), device=request["device"])
    backend = choose(settings).backend
    found: list[dict[str, Any]] = [{} for _ in request["documents"]]
    layouts: dict[int, Layout] = {}
    files = tuple(request["catalog_files"])
    with joined(folder, backend, request.get("timeout_s", 120.0)):
        for i, document in enumerate(request["documents"]):
            try:
                layout = Layout(document, files, settings)
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                found[i]["error"] = f"{type(error).__name__}: {error}"[:300]
                continue
            if request.get("losses"):
                found[i] |= learn(layout, request["losses"], Path(request["kept"]), request["reference"])
            if request.get("messages"):
                found[i]["messages"] = messages(layout)
            if request.get("rounds"):
                layouts[i] = layout
                layout.step(1)
            else:
                del layout
                gc.collect()
        _take_turns(layouts, request.get("rounds", 0), found)
    return found


def _take_turns(layouts: dict[int, Layout], rounds: int, found: list[dict[str, Any]]) -> None:
    pulse = None
    for r in range(rounds):
        for i, layout in layouts.items():
            if layout.machine.kind == "cpu":
                pulse = pulse or Pulse()
                found[i].setdefault("pulse", []).append(slowest(pulse.beats) / BEATS)
            found[i].setdefault("seconds", []).append(layout.step(2 + r)[1])
    for i, layout in layouts.items():
        found[i]["memory"] = layout.memory()


if __name__ == "__main__":
    sys.exit(answer(work))
