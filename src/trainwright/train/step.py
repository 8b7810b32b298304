"""One optimizer step of a laid-out model, and everything that lives from step to step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SpecError
from ..frameworks import FRAMEWORKS
from ..resolve import Run
from . import adopt, compiled, context, losses, state, weights
from . import optimizer as optimizers
from .data.batches import Batch
from .data.samples import IGNORED
from .decoder import Decoder, build
from .mesh import Ranks
from .metrics import memory_by_kind, tensor_bytes
from .modules import Router
from .parallelize import DTYPES, apply, formats, parameter_dtype
from .pipeline import Pipeline
from .reduce import sum_gradients
from .settings import Settings

GROWTH_STEPS = 2000  # steps without overflow until the loss scale doubles


@dataclass(frozen=True)
class StepResult:
    """`loss` is the mean over the step's target tokens; `skipped`: gradients overflowed (fp16) and nothing was changed."""

    loss: float
    gradient_norm: float
    tokens: int
    rate: float
    skipped: bool
    seconds: float


class Trainer:
    """A model, laid out; `step` runs one batch of this replica's sequences.

    The model is the plan's own, or what `model()` returns (see `adopt`). `notes`: what was chosen otherwise than asked, a sentence each.
    """

    def __init__(self, run: Run, settings: Settings, ranks: Ranks, model: adopt.Maker | None = None) -> None:
        self.run, self.settings, self.ranks = run, settings, ranks
        self.model, self.notes = model, list[str]()
        losses.check(run)
        self.steps = 0
        self.low = DTYPES.get(run.job.precision)
        if self.low is None:
            raise SpecError(f"{run.job.precision} products are only planned here", "training.precision", sorted(DTYPES))
        self.scale = settings.loss_scale if run.job.precision == "fp16" else 1.0
        self.good = 0
        self._build()
        named = [(n, p) for part in self.parts for n, p in part.named_parameters() if p.requires_grad]
        self.named = [(plain(n), p) for n, p in named]
        self._load_initial()
        self._make_optimizer()

    parts: list[Decoder | adopt.Adopted]
    calls: list[nn.Module]
    masters: optimizers.Masters | None
    optimizer: torch.optim.Optimizer

    def _build(self) -> None:
        """`parts`: the pieces of the model that this rank holds; `calls`: what to call for each."""
        backend = compiled.backend_of(self.run, self.settings, self.ranks.machine)
        self.notes += compiled.notes(self.run, self.settings, backend)
        self.pipeline = None
        if self.model is not None:
            own = adopt.Adopted(self.model, self.run, self.settings.seed)
            self.parts, self.calls = [own], [adopt.apply(own, self.run, self.ranks, backend)]
            return
        if self.ranks.size("pp") > 1:
            self.pipeline = Pipeline(self.run, self.ranks, self.settings.seed, backend)
        if self.pipeline is not None:
            self.parts = [s.part for s in self.pipeline.stages.values()]
            self.calls = [s.call for s in self.pipeline.stages.values()]
            return
        with torch.device("meta"):
            part = build(self.run.model, attention=self.run.plan.structure.attention, dtype=parameter_dtype(self.run))
        self.parts = [part]
        self.calls = [apply(part, self.run, self.ranks, self.settings.seed, backend)]

    def _load_initial(self) -> None:
        if self.settings.init:
            adopt.refuse_files(self.model)
            weights.load(self.run.model, Path(self.settings.init), self.named)

    def _make_optimizer(self) -> None:
        self.masters = optimizers.Masters(self.named) if formats(self.run).masters else None
        self.optimizer = optimizers.make(
            self.run, self.masters.named if self.masters else self.named, self.settings, self.ranks, self.notes
        )

    # one step

    def step(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        self._balance_experts()
        batch = context.cut(batch.to(self.ranks.machine.device, pin=self.ranks.machine.pinned), self.run, self.ranks)
        rate = self._set_rate()
        count, counted = self._count(batch)
        loss = self._forward_backward(batch, lambda: self._factor(count, counted))
        total = loss.detach()
        dist.all_reduce(total, group=self.ranks.data.get_group())
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.ranks.group("pp"))
        norm, skipped = self._update()
        self.steps += 1
        targets = int(count)
        mean = float(total) / max(targets, 1)
        return StepResult(mean, norm, targets, rate, skipped, time.perf_counter() - started)

    def _balance_experts(self) -> None:
        """The balance loss is a mean over the step's passes and over the ranks that see different tokens; it is no part of the loss that is reported."""
        parts = self.ranks.size("tp") if self.run.plan.structure.sequence_parallel else 1
        weight = self.settings.router_balance * self.scale / (self.run.plan.accumulation * parts)
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, Router):
                    module.balance = weight

    def _set_rate(self) -> float:
        rate = self.settings.rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _count(self, batch: Batch) -> tuple[torch.Tensor, dist.Work]:
        """Target tokens of the whole step, which the loss is a mean over, whoever has more of them; summed while the first forward pass runs."""
        count = (batch.labels != IGNORED).sum()
        return count, dist.all_reduce(count, group=self.ranks.data.get_group(), async_op=True)

    def _factor(self, count: torch.Tensor, counted: dist.Work) -> torch.Tensor:
        """What a rank's summed loss is multiplied by before backward. A tensor: the host waits for no device."""
        counted.wait()
        return self.scale * self.ranks.data.size() / count.clamp(min=1)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        size = self.run.plan.micro_batch_size
        rows = batch.tokens.shape[0]
        cut = lambda t, i: None if t is None else t[i : i + size]  # noqa: E731
        found = [Batch(*(cut(t, i) for t in (batch.tokens, batch.labels, batch.positions, batch.documents))) for i in range(0, rows, size)]
        return found

    def _forward_backward(self, batch: Batch, factor: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Gradients of `factor()` x the summed loss of all micro-batches; returns this rank's summed loss."""
        if self.pipeline is not None:
            with contextlib.ExitStack() as around:
                for setting in self._contexts():
                    around.enter_context(setting)
                return self.pipeline.run_step(self.micro_batches(batch), lambda out, labels: self._pipeline_loss(out, labels, factor))
        call, part, total = self.calls[0], self.parts[0], torch.zeros((), device=self.ranks.machine.device)
        pieces = self.micro_batches(batch)
        s = self.run.plan.structure
        # without sharding whole gradients are held either way
        no_sync = s.sharding == "none" or FRAMEWORKS[s.framework].memory.puts_off(self.run.model.family, s)
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            with contextlib.ExitStack() as around:
                if isinstance(call, nn.parallel.DistributedDataParallel) and not last:
                    around.enter_context(call.no_sync())
                reduces = hasattr(part, "set_requires_gradient_sync")
                if reduces:
                    part.set_requires_gradient_sync(last or not no_sync)
                if isinstance(part, Decoder):
                    part.turn.sums = last or (reduces and not no_sync and self.ranks.shards.size() > 1)
                for setting in self._contexts():
                    around.enter_context(setting)
                given = (piece.labels,) if part.loss is not None else ()
                out = call(piece.tokens, piece.positions, piece.documents, *given)
                loss = out if part.loss is not None else losses.loss_of(out, piece.labels)
                total += loss.detach()
                (loss * factor()).backward()
        if not isinstance(call, nn.parallel.DistributedDataParallel):
            sum_gradients(self.parts, self.ranks)
        return total

    def _pipeline_loss(
        self, out: torch.Tensor, labels: torch.Tensor, factor: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.loss_of(out, labels) if out.dim() else out
        return loss * factor(), loss.detach()

    def _contexts(self) -> Iterator[Any]:
        if self.run.job.loss == "vocab-parallel" and self.ranks.size("tp") > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            yield loss_parallel()
        if self.run.job.autocast and self.low is not None and self.low != torch.float32:
            yield torch.autocast(self.ranks.machine.kind, dtype=self.low)

    def _update(self) -> tuple[float, bool]:
        weights = [p for _, p in self.named]
        for p in weights:
            optimizers.settle(p)
        once = [p for p in weights if not getattr(p, "is_copy", False)]
        norm = float(optimizers.gradient_norm(once, self.ranks)) / self.scale
        finite = math.isfinite(norm)
        skipped = not finite and self.run.job.precision == "fp16"
        if not skipped:
            clip = self.settings.clip
            factor = (min(1.0, clip / (norm + 1e-6)) if clip and finite else 1.0) / self.scale
            if factor != 1.0:
                optimizers.scale_gradients(weights, factor)
            if self.masters:
                self.masters.step(self.optimizer)
            else:
                self.optimizer.step()
        for p in weights:
            p.grad = None
        self._move_scale(skipped)
        return norm, skipped

    def _move_scale(self, skipped: bool) -> None:
        """fp16's loss scale: half after an overflow, double after `GROWTH_STEPS` without one (arXiv:1710.03740)."""
        if self.run.job.precision != "fp16":
            return
        self.good = 0 if skipped else self.good + 1
        if skipped:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % GROWTH_STEPS == 0:
            self.scale *= 2

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by kind. Gradients are gone after a step; each had its weight's shape and type."""
        gradients = tensor_bytes(p for part in self.parts for p in part.parameters() if p.requires_grad)
        found = memory_by_kind(self.parts, [self.optimizer], gradients)
        return {"master_weights": tensor_bytes(m for _, m in self.masters.named), **found} if self.masters else found

    # what is kept

    def state(self) -> dict[str, torch.Tensor]:
        """Model and optimizer as this trainer's own (distributed) tensors, under names that no layout changes; loading writes into them."""
        return state.tensors(self)

    def expect(self) -> None:
        """Before a load: what only exists from the first step on is made."""
        state.make_states(self)

    def loaded(self, progress: dict[str, Any]) -> None:
        """After `state` was written into."""
        state.spread(self)
        self.steps, self.scale, self.good = int(progress["steps"]), float(progress["scale"]), int(progress["good"])

    def progress(self) -> dict[str, Any]:
        return {"steps": self.steps, "scale": self.scale, "good": self.good}


def plain(name: str) -> str:
    """A parameter's name without the wrapper that recomputes its block."""
    return name.replace("_checkpoint_wrapped_module.", "")
