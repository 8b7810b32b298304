"""A run's own trainer on fake tensors: one rank of the plan's true size is built and takes a step, whatever this machine has.

Model, wrappers and optimizer are those of a real run (`step.Trainer`); only the process group carries nothing and tensors have no data, so what reads a
number (the loss, the gradient's norm) is left out.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

from ..errors import SpecError, TrainwrightError, one_line
from ..resolve import Run
from . import context
from . import optimizer as optimizers
from .data.batches import Batch
from .decoder import Decoder, build
from .device import Machine
from .engines import NATIVE, engine_of
from .experts import Route
from .mesh import Ranks, ranks_of
from .metrics import state_tensors, tensor_bytes
from .modules import Experts
from .parallelize import apply, parameter_dtype
from .pipeline import Key, Mail, Pipeline, part_of
from .probe import quiet
from .program import Buckets, world
from .settings import Settings
from .step import Trainer
from .tracker import Tracker


@dataclass(frozen=True)
class DryRun:
    """Bytes of live tensors of rank `rank` of `ranks`: what it owns between backward and the optimizer's step, and the most that lives in its second step."""

    rank: int
    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    peak_bytes: int
    seconds: float
    software: str


def lay_out(part: Decoder, run: Run, ranks: Ranks, seed: int) -> nn.Module:
    """The plan's wrappers around modules that are on their device already."""
    part.__dict__["to_empty"] = lambda device: part
    with any_graph():
        call = apply(part, run, ranks, seed)
    for module in part.modules():
        if isinstance(module, Experts):
            route_evenly(module)
    if isinstance(call, nn.parallel.DistributedDataParallel):
        hook_without_data(call)
    return call


@contextlib.contextmanager
def any_graph() -> Iterator[None]:
    """DDP that is told of a static graph reads from a tensor which weights were used."""
    before = nn.parallel.DistributedDataParallel._set_static_graph
    nn.parallel.DistributedDataParallel._set_static_graph = lambda ddp: None
    try:
        yield
    finally:
        nn.parallel.DistributedDataParallel._set_static_graph = before


def evenly(total: int, number: int) -> list[int]:
    return [total // number + (i < total % number) for i in range(number)]


def route_evenly(module: Experts) -> None:
    """Which expert a token goes to is data: each gets as many here. Ranks that share experts are alike, so that each sends what this one keeps."""
    route, count = module.route, module.up_proj.weight.shape[0]  # all experts, those of other ranks too
    module.__dict__["counts"] = lambda experts: evenly(experts.numel(), count)
    if not isinstance(route, Route):
        return

    def exchanged(experts: torch.Tensor) -> tuple[list[int], list[int], list[int], torch.Tensor]:
        here = count // route.size
        each = evenly(experts.numel(), count)
        mine = each[dist.get_rank(route.group) * here :][:here]
        sent = [sum(each[i : i + here]) for i in range(0, count, here)]
        received = [sum(mine)] * route.size
        return sent, received, [n * route.size for n in mine], torch.arange(sum(received))

    route.__dict__["exchanged"] = exchanged


class NoMail(Mail):
    """What a rank sends is gone at once, what it receives is there at once and empty: nobody is at the other end."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.sending = []

    def send(self, x: torch.Tensor, receiver: int) -> None:
        x.contiguous()

    def receive(self, key: Key, empty: Callable[[], torch.Tensor]) -> torch.Tensor:
        return empty()


class DryPipeline(Pipeline):
    """One rank's stages and its whole list, without the others."""

    def _part(self, layers: range, first: bool, last: bool) -> Decoder:
        return part_of(self.run, layers, first, last)

    def _lay_out(self, part: Decoder, seed: int) -> nn.Module:
        return lay_out(part, self.run, self.ranks, seed)

    def _mail(self) -> Mail:
        return NoMail()


class Dry(Trainer):
    """`Trainer` whose step reads no number."""

    gradients = 0

    def _build(self) -> None:
        """Fake tensors cost nothing: no detour over the meta device, whose exchange of tensors they do not allow."""
        self.pipeline = DryPipeline(self.run, self.ranks, self.settings.seed) if self.run.plan.pp > 1 else None
        if self.pipeline is not None:
            self.parts = [s.part for s in self.pipeline.stages.values()]
            self.calls = [s.call for s in self.pipeline.stages.values()]
            return
        part = build(self.run.model, attention=self.run.plan.structure.attention, dtype=parameter_dtype(self.run))
        self.parts = [part]
        self.calls = [lay_out(part, self.run, self.ranks, self.settings.seed)]

    def dry_step(self, batch: Batch) -> None:
        batch = context.cut(batch, self.run, self.ranks)
        self._set_rate()
        self._forward_backward(batch, lambda: torch.ones(()))
        self.gradients = tensor_bytes(p.grad for _, p in self.named if p.grad is not None)
        for _, p in self.named:
            optimizers.settle(p)
        if self.masters:
            self.masters.step(self.optimizer)
        else:
            self.optimizer.step()
        for _, p in self.named:
            p.grad = None


def hook_without_data(ddp: Any, reduce: Callable[[torch.Tensor], object] = lambda buffer: None, *, rebuilds: bool = False) -> None:
    """DDP's own reduction is C++ that reads data: buckets are answered as they are once `reduce` has seen them. They stay one unless the reducer `rebuilds`
    them, which needs real tensors."""

    def answer(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    answer.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    ddp.register_comm_hook(None, answer)
    if not rebuilds:
        ddp.reducer = Buckets(ddp.reducer)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a tensor cut for `number` ranks, each made when it is asked for: with thousands of ranks, cutting all of them takes minutes."""

    tensor: torch.Tensor
    number: int
    dim: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = self.tensor.shape[self.dim]
        size = -(-rows // self.number)
        start = min(index * size, rows)
        piece = self.tensor.narrow(self.dim, start, min(size, rows - start))
        return piece if piece.numel() else piece.new_empty(0)


@contextlib.contextmanager
def lazy_pieces() -> Iterator[None]:
    """FSDP2 cuts each weight into a piece a rank and takes one of them."""
    before = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = Pieces
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = before


def dry_run(run: Run, rank: int = 0) -> DryRun:
    """Builds and steps rank `rank`. Raises `SpecError` where PyTorch, or this trainer, refuses the plan, or another engine would run it."""
    settings = Settings(device="cpu")
    engine = engine_of(run, settings)
    if engine.name != NATIVE:
        what = f"what can be built here is PyTorch's own wrappers, not {engine.title}, which runs this plan"
        raise SpecError(what, "strategy.framework", ["fsdp2", "ddp"])
    engine.check(run, settings, False)
    began = time.perf_counter()
    tracker = Tracker()
    try:
        with quiet(), world(run.plan.gpus, rank):
            ranks = ranks_of(run.plan, Machine("cpu", "gloo"))  # a mesh is data: it is made of real tensors
            if run.model.experts and ranks.spreads_experts:
                ranks.experts  # noqa: B018 the mesh of experts as well, which is made when it is first asked for
            with lazy_pieces(), FakeTensorMode(), tracker:
                trainer = Dry(run, settings, ranks)
                batch = fake_batch(run)
                trainer.dry_step(batch)
                tracker.reset()
                trainer.dry_step(batch)
                found = numbers(trainer, run, rank, tracker, time.perf_counter() - began)
                del trainer, batch
    except TrainwrightError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, KeyError, AttributeError, IndexError) as error:
        what = f"PyTorch {torch.__version__} refuses this run on fake tensors: {type(error).__name__}: {one_line(error, 300)}"
        raise SpecError(what, "strategy") from error
    gc.collect()
    return found


def fake_batch(run: Run) -> Batch:
    """One replica's sequences of a step: as many micro-batches as accumulate, no more than two (the others hold the same)."""
    rows = run.plan.micro_batch_size * min(run.plan.accumulation, 2 if run.plan.pp == 1 else run.plan.accumulation)
    shape = (rows, run.job.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.arange(run.job.seq_len).expand(shape)
    documents = torch.zeros(shape, dtype=torch.int64) if run.job.packing else None
    return Batch(tokens, torch.zeros(shape, dtype=torch.int64), positions, documents)


def numbers(trainer: Dry, run: Run, rank: int, tracker: Tracker, seconds: float) -> DryRun:
    states = list(state_tensors(trainer.optimizer))
    masters = [m for _, m in trainer.masters.named] if trainer.masters else []
    return DryRun(
        rank=rank,
        ranks=run.plan.gpus,
        parameters=tensor_bytes(p for part in trainer.parts for p in part.parameters()),
        gradients=trainer.gradients,
        optimizer=tensor_bytes([*states, *masters]),
        peak_bytes=tracker.peak,
        seconds=seconds,
        software=f"torch {torch.__version__}",
    )
