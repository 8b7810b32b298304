"""Pipeline ranks: torch.distributed.pipelining's own stages and schedules, one rank at a time, on fake tensors.

Shapes are given (static mode), so no metadata travels; receive buffers exist for every micro-batch, as in a real run. Logits are not returned
(`return_outputs=False`, as torchtitan calls it).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import InferenceMode, PipelineScheduleMulti, get_schedule_class
from torch.utils._python_dispatch import _disable_current_modes

from ..cost.stages import layers_per_stage
from ..schedules import SCHEDULES
from ..schedules.actions import Placement
from .models import GPT
from .program import Program, loss_of, two_steps, world
from .tracker import Tracker, storages


class Part(nn.Module):
    """A stage: the embedding (first), some layers, final norm and head (last). Positions are a buffer, as every rank makes them itself."""

    def __init__(self, model: Any, first: bool, last: bool, layers: nn.ModuleList) -> None:
        super().__init__()
        self.first, self.last, self.gpt = first, last, isinstance(model, GPT)
        self.layers = layers
        inner = model if self.gpt else model.m.model
        if first:
            self.embed = inner.wte if self.gpt else inner.embed_tokens
            if self.gpt:
                self.wpe = inner.wpe
        if not self.gpt:
            self.rotary = inner.rotary_emb
        if last:
            self.norm, self.head = inner.norm, model.head
        self.positions: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embed(x) + self.wpe(self.positions) if self.gpt else self.embed(x)
        if self.gpt:
            for layer in self.layers:
                x = layer(x)
        else:
            turned = self.rotary(x, self.positions)
            for layer in self.layers:
                x = layer(x, attention_mask=None, position_ids=self.positions, position_embeddings=turned)
        return self.head(self.norm(x)) if self.last else x


class StageProgram(Program):
    """`Program` for one pipeline rank."""

    def __init__(self, spec: Mapping[str, Any], tracker: Tracker, rank: int) -> None:
        super().__init__(spec, tracker)
        s = self.strategy
        self.rank, self.pp = rank, s["pp"]
        self.entry = SCHEDULES.get_or_raise(s.get("schedule", "1f1b"), "strategy.schedule")
        place = Placement(self.entry.placement, self.pp, s.get("virtual_stages", 1), self.count)
        self.number, self.mine = place.stages, place.stages_of(rank)

    def make(self) -> None:
        super().make()
        with _disable_current_modes():
            group = dist.new_group(list(range(0, self.pp * self.dp * self.tp, self.dp * self.tp)))
        stages = [self._stage(index, module, group) for index, module in zip(self.mine, self.calls)]
        kind: Any = get_schedule_class(self.entry.torch_class or "")
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(stages if several else stages[0], self.count, loss_fn=loss_of, scale_grads=False)
        self.schedule._warmup_p2p = lambda *args: None
        for part in self.parts:
            part.positions = self.positions
        rows = self.batch * self.count
        self.ids = torch.zeros(rows, self.seq, dtype=torch.long)
        self.labels = torch.zeros(rows, self.seq, dtype=torch.long)

    def _stage(self, index: int, module: Any, group: Any) -> PipelineStage:
        split = self.tp if self.strategy.get("sequence_parallel") else 1  # the boundary lies in the sequence region
        low = torch.float32 if self.autocast else self.low
        hidden = torch.zeros(self.batch, self.seq // split, self.hidden, dtype=low)
        out = torch.zeros(self.batch, self.seq, self.vocabulary, dtype=low) if index == self.number - 1 else hidden
        stage = PipelineStage(
            module,
            index,
            self.number,
            torch.device("cpu"),
            input_args=torch.zeros(self.batch, self.seq, dtype=torch.long) if index == 0 else hidden.requires_grad_(),
            output_args=out.detach().requires_grad_(),
            group=group,
        )
        stage._inference_mode = InferenceMode.STATIC
        return stage

    def cut(self, model: Any) -> list[Any]:
        layers = list(model.layers)
        counts = layers_per_stage(len(layers), self.number, self.strategy.get("layers_per_stage"))
        config = None if isinstance(model, GPT) else model.m.config
        self.hidden = model.wte.embedding_dim if config is None else config.hidden_size
        self.vocabulary = model.head.out_features
        table = model.wte if config is None else model.m.model.embed_tokens
        if model.head.weight is table.weight and {0, self.number - 1} <= {*self.mine}:  # two stages share no tensor
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        found = []
        for index in self.mine:
            start = sum(counts[:index])
            here = nn.ModuleList(layers[start : start + counts[index]])
            found.append(Part(model, index == 0, index == self.number - 1, here))
        return found

    def step(self, found: dict[str, int]) -> None:
        tracker = self.tracker
        tracker.phase = "step"
        given = [self.ids] if 0 in self.mine else []
        target = {"target": self.labels} if self.number - 1 in self.mine else {}
        with torch.autocast("cpu", dtype=self.low) if self.autocast else torch.enable_grad():
            self.schedule.step(*given, **target, return_outputs=False)
        found["saved_bytes"] = found["after_forward_bytes"] = 0
        found["after_backward_bytes"] = tracker.current
        found["gradient_bytes"] = storages([p.grad for p in self.trained])
        tracker.phase = "opt"
        for o in self.optimizers:
            o.step()


def measure_stages(table: Mapping[str, Any], trace: bool = False) -> tuple[dict[str, Any], Tracker]:
    """Every pipeline rank, one after the other; the numbers of the one with the highest peak, and in `ranks` those of each."""
    strategy = table["strategy"]
    pp, inner = strategy["pp"], strategy.get("dp", 1) * strategy.get("tp", 1)
    answers: list[tuple[dict[str, Any], Tracker]] = []
    for rank in range(pp):
        tracker = Tracker(trace)
        with world(pp * inner, rank * inner), FakeTensorMode(), tracker:
            result = two_steps(StageProgram(table, tracker, rank), tracker)
        gc.collect()
        del result["saved_bytes"], result["after_forward_bytes"]
        answers.append((result | {"rank": rank}, tracker))
    keys = ("peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_phase")
    worst, tracker = max(answers, key=lambda a: int(a[0]["peak_bytes"]))
    worst["ranks"] = {str(rank): {k: a[k] for k in keys} for rank, (a, _) in enumerate(answers)}
    return worst, tracker
