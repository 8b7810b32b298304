"""One rank of a fake world: PyTorch's own wrappers and optimizer around a model, and one step of them.

The model is built under FakeTensorMode and a "fake" process group of the plan's size; DDP, ZeroRedundancyOptimizer, FSDP2, replicate(), DTensor and the
optimizers are PyTorch's own code. Bytes are live tensor storages: no allocator rounding, no context, no kernel scratch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ..cost.traffic.buckets import BUCKET_BYTES, FIRST_BYTES
from ..errors import SpecError
from .caches import forget_world
from .models import LOW, add_adapters, add_checkpoints, build, split_over
from .tracker import Tracker, storages

REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Meshes are data, not the program that is measured: their methods compute on real tensors meanwhile."""

    def outside(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    raw = {name: DeviceMesh.__dict__[name] for name in ("_concatenate", "_flatten") if name in DeviceMesh.__dict__}
    for name, method in raw.items():
        static = isinstance(method, staticmethod)
        setattr(DeviceMesh, name, staticmethod(outside(method.__func__)) if static else outside(method))
    try:
        yield
    finally:
        for name, method in raw.items():
            setattr(DeviceMesh, name, method)


class WithLoss(nn.Module):
    """Model and cross-entropy on fp32 logits; `chunks`: the head and the loss run over pieces of the sequence (torchtune's chunked loss)."""

    def __init__(self, model: Any, chunks: int = 0) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.chunks:
            return loss_of(self.model(ids, positions), labels)
        x = self.model.hidden(ids, positions)
        logits = [self.model.head(piece) for piece in x.chunk(self.chunks, dim=1)]
        total: Any = 0.0
        for piece, want in zip(logits, labels.chunk(self.chunks, dim=1)):
            total = total + F.cross_entropy(piece.reshape(-1, piece.size(-1)).float(), want.reshape(-1), reduction="sum")
        return total / labels.numel()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.view(-1))


@contextlib.contextmanager
def filled_buckets() -> Iterator[None]:
    """DDP begins with one bucket and rebuilds it after the first step: here it begins with those that it would end with, filled from the last parameter."""
    assign = dist._compute_bucket_assignment_by_size

    def arrived(parameters: list[torch.Tensor], limits: list[int], sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
        found, limits = assign(parameters[::-1], [FIRST_BYTES, BUCKET_BYTES], sparse[::-1])
        return [[len(parameters) - 1 - i for i in bucket] for bucket in reversed(found)], limits[::-1]  # DDP turns both round

    dist._compute_bucket_assignment_by_size = arrived
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign


class Buckets:
    """DDP's reducer without the rebuilding of buckets, which reads data that fake tensors do not have; sizes stay what they are."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


class Program:
    """One rank's model, wrappers, optimizer and step, from a run spec."""

    def __init__(self, spec: Mapping[str, Any], tracker: Tracker) -> None:
        self.spec, self.tracker = spec, tracker
        self.training, self.strategy = spec["training"], spec["strategy"]
        s, t = self.strategy, self.training
        self.dp, self.tp = s.get("dp", 1), s.get("tp", 1)
        self.batch, self.seq = s.get("micro_batch_size", 1), t["seq_len"]
        self.count = t["global_batch_size"] // (self.batch * self.dp)
        self.low = LOW[t["precision"]]
        self.autocast = t.get("autocast", False)
        fp32 = self.low == torch.float32 or t.get("master_weights", "none") == "fp32"
        self.stored = torch.float32 if fp32 else self.low
        self.mixed = s["framework"] == "fsdp2" and self.low != torch.float32 and fp32 and not self.autocast
        self.no_sync = s.get("options", {}).get("no_sync", True)  # FSDP2: gradients are reduced once, after the last micro-batch
        self.shorten = False  # of the micro-batches between the first and the last, which are alike, one runs for all
        self.parts: list[Any] = []  # what is wrapped: the whole model, or each stage of a pipeline rank
        self.calls: list[Callable[..., torch.Tensor]] = []  # the same with their wrappers
        self.fsdp: Any = None
        self.ddp: Any = None

    def make(self) -> None:
        s, t = self.strategy, self.training
        meshes = self._meshes()
        torch.set_default_dtype(self.stored)
        model = build(self.spec["model"], s.get("attention", "flash"))
        torch.set_default_dtype(torch.float32)
        self.parts = self.cut(model)
        self.model: nn.Module = self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)
        if self.tp > 1:
            split_over(
                model, meshes["tp"], sequence=s.get("sequence_parallel", False), vocabulary=t.get("loss", "plain") == "vocab-parallel"
            )
        if t.get("method", "full") == "lora":
            add_adapters(self.model, t["lora_targets"], t["lora_rank"])
        self.calls = [self._wrapped(part, meshes["dp"]) for part in self.parts]
        self._optimizer()
        self.ids = torch.zeros(self.batch, self.seq, dtype=torch.long)
        self.labels = torch.zeros(self.batch, self.seq, dtype=torch.long)
        self.positions = torch.arange(self.seq).unsqueeze(0)

    def cut(self, model: Any) -> list[Any]:
        """What this rank holds of the model, in the pieces that are wrapped."""
        chunks = self.training.get("loss_chunks", 8) if self.training.get("loss") == "chunked" else 0
        return [WithLoss(model, chunks)]

    def _wrapped(self, part: Any, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
        s, units = self.strategy, add_checkpoints(part, self.strategy)
        if s["framework"] == "fsdp2" and (s["sharding"] != "none" or self.dp > 1):
            self._shard(part, units, mesh)
        elif s["framework"] == "ddp" and self.dp > 1:  # a rank alone has nobody to share gradients with
            return self._wrap_in_ddp(part, mesh)
        found: Callable[..., torch.Tensor] = part
        return found

    def _meshes(self) -> dict[str, DeviceMesh]:
        s, found = self.strategy, {}
        replicas = s.get("dp_replicate", 1)
        split = replicas > 1 and s["sharding"] in ("zero2", "zero3")
        shape = (replicas, self.dp // replicas) if split else (self.dp,)
        names = ("dp_replicate", "dp_shard") if split else ("dp",)
        with _disable_current_modes():
            pp = self.strategy.get("pp", 1)
            mesh = init_device_mesh("cpu", (pp, *shape, self.tp), mesh_dim_names=("pp", *names, "tp"))
            found["dp"], found["tp"] = mesh[names] if split else mesh["dp"], mesh["tp"]
            for name in (*names, "tp"):
                group = mesh.get_group(name)
                self.tracker.axes[group.group_name] = ("tp" if name == "tp" else "dp", group.size())
        return found

    def _shard(self, part: Any, units: list[nn.Module], mesh: DeviceMesh) -> None:
        s, t = self.strategy, self.training
        policy = (
            MixedPrecisionPolicy(param_dtype=self.low, reduce_dtype=REDUCE[t.get("gradient_dtype", "fp32")])
            if self.mixed
            else MixedPrecisionPolicy()
        )
        if s["sharding"] == "none":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            for unit in units:
                replicate(unit, mesh=mesh, mp_policy=policy)
            self.fsdp = replicate(part, mesh=mesh, mp_policy=policy)
            return
        zero3 = s["sharding"] == "zero3"
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=zero3)
        self.fsdp = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=zero3 and s.get("reshard_root", True))

    def _wrap_in_ddp(self, part: Any, mesh: DeviceMesh) -> Any:
        with filled_buckets():
            ddp = nn.parallel.DistributedDataParallel(
                part, process_group=mesh.get_group(), gradient_as_bucket_view=True, broadcast_buffers=False, init_sync=False
            )

        def all_reduce(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            self.tracker.message("dp", "all_reduce", self.dp, str(buffer.dtype)[6:], buffer.numel() * buffer.element_size())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        all_reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        ddp.register_comm_hook(None, all_reduce)
        ddp.reducer = Buckets(ddp.reducer)
        self.ddp = ddp
        return ddp

    def _optimizer(self) -> None:
        t, s = self.training, self.strategy
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        kernel = t.get("optimizer_kernel", "fused")
        if self.tp > 1 and self.fsdp is None and not s.get("sequence_parallel"):
            kernel = "for-loop"  # the others refuse plain tensors beside DTensors
        fast = {"fused": kernel == "fused", "foreach": kernel == "foreach"}
        momentum = 0.9 if t.get("optimizer", "adamw") == "sgd_momentum" else 0.0
        kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
            "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, **fast),
            "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=momentum, **fast),
            "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=momentum, **fast),
            "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-3, foreach=kernel == "foreach"),
        }
        make = kinds[t.get("optimizer", "adamw")]
        self.optimizers: list[Any]
        if t.get("optimizer_in_backward"):
            each = {p: make([p]) for p in self.trained}

            def use(p: torch.Tensor) -> None:
                each[p].step()
                each[p].zero_grad(set_to_none=True)

            for p in self.trained:
                p.register_post_accumulate_grad_hook(use)
            self.optimizers = list(each.values())
        elif s["sharding"] == "zero1" and self.ddp is not None:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            group = self.ddp.process_group
            self.optimizers = [ZeroRedundancyOptimizer(self.trained, torch.optim.AdamW, process_group=group, lr=1e-3, **fast)]
        else:
            self.optimizers = [make(self.trained)]

    def states(self) -> Any:
        return [dict(getattr(o, "optim", o).state) for o in self.optimizers]

    def step(self, found: dict[str, int]) -> None:
        tracker = self.tracker
        alike = self.count - 2 if self.shorten and self.count > 3 else 1
        times = [1, alike, 1] if alike > 1 else [1] * self.count
        for i, tracker.weight in enumerate(times):
            last = i == len(times) - 1
            if self.fsdp is not None and self.count > 1:
                self.fsdp.set_requires_gradient_sync(last or not self.no_sync)
            tracker.phase = "fwd"
            before = tracker.current
            with contextlib.ExitStack() as around:
                if self.ddp is not None and not last:
                    around.enter_context(self.ddp.no_sync())
                if self.training.get("loss") == "vocab-parallel" and self.tp > 1:
                    from torch.distributed.tensor.parallel import loss_parallel

                    around.enter_context(loss_parallel())
                with torch.autocast("cpu", dtype=self.low) if self.autocast else contextlib.nullcontext():
                    loss = self.calls[0](self.ids, self.positions, self.labels)
                if i == 0:
                    found["saved_bytes"] = tracker.current - before
                found["after_forward_bytes"] = tracker.current
                tracker.phase = "bwd"
                loss.backward()
                del loss
        found["after_backward_bytes"] = tracker.current
        found["gradient_bytes"] = storages([p.grad for p in self.trained])
        tracker.phase = "opt"
        if not self.training.get("optimizer_in_backward"):
            for o in self.optimizers:
                o.step()

    def forget(self) -> None:
        for p in self.trained:
            p.grad = None


@contextlib.contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """A process group of `size` ranks that sends nothing."""
    if dist.is_initialized():
        raise SpecError("a process group is open in this process; measure in one of its own", "torch.distributed")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with real_meshes():
            yield
    finally:
        dist.destroy_process_group()
        forget_world()


def two_steps(program: Program, tracker: Tracker) -> dict[str, Any]:
    """Makes the program, runs a step that nobody counts and one that is counted; its numbers."""
    found: dict[str, int] = {}
    program.make()
    program.step({})
    program.forget()
    tracker.reset()
    program.step(found)
    return report(program.model, program.states(), tracker, found)


def report(model: nn.Module, states: Any, tracker: Tracker, found: dict[str, int]) -> dict[str, Any]:
    communication = [
        {
            "group": axis,
            "collective": kind,
            "group_size": size,
            "dtype": dtype,
            "phase": phase,
            "count": entry[0],
            "payload_bytes": entry[1],
        }
        for (axis, kind, size, dtype, phase), entry in tracker.messages.items()
    ]
    return {
        "parameter_bytes": storages(list(model.parameters())),
        "buffer_bytes": storages(list(model.buffers())),
        "gradient_bytes": found["gradient_bytes"],
        "optimizer_bytes": storages(states),
        "saved_bytes": found["saved_bytes"],
        "after_forward_bytes": found["after_forward_bytes"],
        "after_backward_bytes": found["after_backward_bytes"],
        "peak_bytes": tracker.peak,
        "peak_phase": tracker.peak_phase,
        "phase_peaks": dict(tracker.peaks),
        "communication": communication,
    }
