"""Pipeline ranks for `measure_memory.py`: torch.distributed.pipelining's own stages and schedules, one rank at a time, on fake tensors.

Shapes are given (static mode), so no metadata travels; receive buffers exist for every micro-batch, as in a real run. Logits are not returned
(`return_outputs=False`, as torchtitan calls it).
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from measure_memory import Program, WithLoss, loss_of, report, world
from memory_models import GPT
from memory_tracker import Tracker, storages
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import InferenceMode
from torch.utils._python_dispatch import _disable_current_modes

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def layers_of(spec: dict[str, Any], layers: int) -> list[int]:
    """Layers of each stage: embedding and head take one slot each, larger stages come first."""
    given = spec["strategy"].get("layers_per_stage")
    if given:
        return list(given)
    stages = spec["strategy"]["pp"]
    slots = [(layers + 2) // stages + (i < (layers + 2) % stages) for i in range(stages)]
    slots[0] -= 1
    slots[-1] -= 1
    return slots


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

    def __init__(self, spec: dict[str, Any], tracker: Tracker, rank: int) -> None:
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
        self.schedule._warmup_p2p = lambda *args: None  # type: ignore[method-assign]
        part.positions = self.positions
        rows = self.batch * self.count
        self.ids = torch.zeros(rows, self.seq, dtype=torch.long)
        self.labels = torch.zeros(rows, self.seq, dtype=torch.long)
        del ids, hidden, out

    def wrap(self, model: Any) -> Any:
        """Cut the model before it is wrapped."""
        layers = list(model.layers)
        counts = layers_of(self.spec, len(layers))
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


def measure_stage(spec: dict[str, Any], trace: bool, only: int | None = None) -> tuple[dict[str, Any], Tracker]:
    """The worst rank's row; `ranks` holds the peak of each."""
    s = spec["strategy"]
    pp, inner = s["pp"], s.get("dp", 1) * s.get("tp", 1)
    best: tuple[dict[str, Any], Tracker] | None = None
    peaks = {}
    for rank in range(pp) if only is None else [only]:
        tracker, found = Tracker(trace), {}
        with world(pp * inner, rank * inner), FakeTensorMode(), tracker:
            program = StageProgram(spec, tracker, rank)
            program.make()
            program.step({})
            program.forget()
            tracker.reset()
            program.step(found)
            result = report(program.model, program.states(), tracker, found)
            del program
        gc.collect()
        del result["saved_bytes"], result["after_forward_bytes"]
        peaks[str(rank)] = {k: result[k] for k in ("peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_phase")}
        if best is None or result["peak_bytes"] > best[0]["peak_bytes"]:
            best = (result, tracker)
    assert best is not None
    best[0]["ranks"] = peaks
    return best


__all__ = ["StageProgram", "WithLoss", "measure_stage"]
