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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import InferenceMode
from torch.utils._python_dispatch import _disable_current_modes

from ..cost.stages import layers_per_stage
from .models import GPT
from .program import Program, loss_of, two_steps, world
from .tracker import Tracker, storages

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


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
        self.rank, self.pp = rank, spec["strategy"]["pp"]

    def make(self) -> None:
        super().make()
        s = self.strategy
        part, first, last = self.model, self.rank == 0, self.rank == self.pp - 1
        module: Any = self.ddp or part
        with _disable_current_modes():
            group = dist.new_group(list(range(0, self.pp * self.dp * self.tp, self.dp * self.tp)))
        width = self.hidden
        low = torch.float32 if self.autocast else self.low
        ids = torch.zeros(self.batch, self.seq, dtype=torch.long)
        split = self.tp if s.get("sequence_parallel") else 1  # the boundary lies in the sequence region
        hidden = torch.zeros(self.batch, self.seq // split, width, dtype=low)
        out = torch.zeros(self.batch, self.seq, self.vocabulary, dtype=low) if last else hidden
        stage = PipelineStage(
            module,
            self.rank,
            self.pp,
            torch.device("cpu"),
            input_args=ids.detach() if first else hidden.requires_grad_(),
            output_args=out.detach().requires_grad_(),
            group=group,
        )
        stage._inference_mode = InferenceMode.STATIC
        kind = SCHEDULES[s.get("schedule", "1f1b")]
        self.schedule = kind(stage, self.count, loss_fn=loss_of, scale_grads=False)
        self.schedule._warmup_p2p = lambda *args: None
        part.positions = self.positions
        rows = self.batch * self.count
        self.ids = torch.zeros(rows, self.seq, dtype=torch.long)
        self.labels = torch.zeros(rows, self.seq, dtype=torch.long)
        del ids, hidden, out

    def wrap(self, model: Any) -> Any:
        """Cut the model before it is wrapped."""
        layers = list(model.layers)
        counts = layers_per_stage(len(layers), self.pp, self.strategy.get("layers_per_stage"))
        start = sum(counts[: self.rank])
        mine = nn.ModuleList(layers[start : start + counts[self.rank]])
        config = None if isinstance(model, GPT) else model.m.config
        self.hidden = model.wte.embedding_dim if config is None else config.hidden_size
        self.vocabulary = model.head.out_features
        return Part(model, self.rank == 0, self.rank == self.pp - 1, mine)

    def step(self, found: dict[str, int]) -> None:
        tracker = self.tracker
        tracker.phase = "step"
        given = [self.ids] if self.rank == 0 else []
        target = {"target": self.labels} if self.rank == self.pp - 1 else {}
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
