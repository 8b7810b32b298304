"""What a rank does: deeper tiny models for pipelines, packed batches for context parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import torch
from layouts import CPU, GLOBAL, MODELS, SEQ, batch, run_of

from trainwright.resolve import Run
from trainwright.spec.run import StrategySection
from trainwright.train.data.batches import Batch
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.watch import Watched

# Seven layers and two ends over eight stages: uneven, the last stage is the head alone.
MODELS |= {
    f"{name}-7": {**MODELS[source], ("n_layer" if source == "gpt" else "num_hidden_layers"): 7}
    for name, source in {"gpt": "gpt", "llama": "llama", "tied": "tied", "moe": "moe"}.items()
}
SPOKEN = {name for part in get_args(StrategySection.model_fields["schedule"].annotation) for name in get_args(part)}


def packed(step: int, rank: int = 0, size: int = 1) -> Batch:
    """Documents of uneven lengths in every sequence, each with positions of its own."""
    plain = batch(step)
    made = torch.Generator().manual_seed(100 + step)
    documents = (torch.rand((GLOBAL, SEQ), generator=made) < 0.15).long().cumsum(1)
    positions = torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount() if n]) for row in documents])
    share = slice(rank * (GLOBAL // size), (rank + 1) * (GLOBAL // size))
    return Batch(*(x[share] for x in (plain.tokens, plain.labels, positions, documents)))


def scheduled(model: str, strategy: dict[str, Any], training: dict[str, Any] | None) -> Run:
    """The run; schedules that no run spec names (they are found by the planner's own studies) stand in for one of as many chunks."""
    name = strategy.get("schedule", "1f1b")
    if name not in SPOKEN:
        strategy = {**strategy, "schedule": "1f1b" if strategy["virtual_stages"] == 1 else "interleaved-1f1b"}
    run = run_of(model, strategy, training)
    structure = dataclasses.replace(run.plan.structure, schedule=name)
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, structure=structure))


def train(
    model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None, documents: bool = False, **settings: Any
) -> dict[str, Any]:
    """Three steps: losses, norms, and this rank's gradients of the first step."""
    run = scheduled(model, strategy, training)
    ranks = ranks_of(run.plan, CPU)
    trainer = Watched(run, Settings(**{"steps": 3, "warmup_steps": 0, "learning_rate": 1e-3, "eps": 1e-5, **settings}), ranks)
    draw = packed if documents else batch
    found = [trainer.step(draw(0, *ranks.replica))]
    gradients = {name: g.numpy() for name, g in trainer.gradients.items()}
    trainer.keeps_gradients = False
    found += [trainer.step(draw(i, *ranks.replica)) for i in (1, 2)]
    return {"loss": [f.loss for f in found], "norm": [f.gradient_norm for f in found], "gradients": gradients}
