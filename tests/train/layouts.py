"""Tiny models and layouts, and one trainer run that every layout is held against."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.resolve import resolve
from trainwright.spec.run import validate
from trainwright.train.data.batches import Batch
from trainwright.train.device import Machine
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.step import Trainer
from trainwright.train.watch import Watched, whole

BASE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
BASE |= {"vocab_size": 256, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256},
    "llama": {"model_type": "llama", **BASE},
    "tied": {"model_type": "llama", **BASE, "tie_word_embeddings": True},
    "moe": {"model_type": "mixtral", **BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "few experts": {"model_type": "mixtral", **BASE, "num_local_experts": 2, "num_experts_per_tok": 1},
}
SEQ, GLOBAL = 32, 8
CPU = Machine("cpu", "gloo")


def run_of(model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None) -> Any:
    gpus = 1
    for axis in ("dp", "tp", "pp", "cp"):
        gpus *= strategy.get(axis, 1)
    spec = {
        "model": MODELS[model],
        "cluster": {"gpu": "H100", "nodes": 1, "gpus_per_node": gpus},
        "training": {"seq_len": SEQ, "global_batch_size": GLOBAL, "precision": "fp32", "optimizer_kernel": "foreach", **(training or {})},
        "strategy": {"framework": "fsdp2", **strategy},
    }
    return resolve(validate(spec))


def batch(step: int, rank: int = 0, size: int = 1) -> Batch:
    """The same sequences for every layout: each replica takes its share. Some targets are ignored, more of them in some sequences than in others."""
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (GLOBAL, SEQ), generator=made)
    labels = tokens.roll(-1, 1)
    for row in range(GLOBAL):
        labels[row, SEQ - 1 - row :] = -100
    share = GLOBAL // size
    mine = slice(rank * share, (rank + 1) * share)
    return Batch(tokens[mine], labels[mine], torch.arange(SEQ).unsqueeze(0).expand(share, -1))


def trainer(model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None) -> Trainer:
    """On the ranks that are there, with few warm-up steps and a rate at which three steps are seen."""
    run = run_of(model, strategy, training)
    return Trainer(run, Settings(steps=3, warmup_steps=0, learning_rate=1e-3, eps=1e-5), ranks_of(run.plan, CPU))


def notes(model: str, strategy: dict[str, Any], training: dict[str, Any]) -> list[str]:
    """What the trainer chose otherwise than it was asked."""
    return trainer(model, strategy, training).notes


def train(model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None, steps: int = 3, **settings: Any) -> dict[str, Any]:
    """Losses and gradient norms of `steps` steps, this rank's first whole gradients and resident bytes, on whatever ranks are there."""
    run = run_of(model, strategy, training)
    ranks = ranks_of(run.plan, CPU)
    trainer = Watched(run, Settings(**{"steps": steps, "warmup_steps": 0, "learning_rate": 1e-3, "eps": 1e-5, **settings}), ranks)
    found = [trainer.step(batch(0, *ranks.replica))]
    gradients = {name: g.numpy() for name, g in trainer.gradients.items()}
    trainer.keeps_gradients = False
    found += [trainer.step(batch(i, *ranks.replica)) for i in range(1, steps)]
    return {
        "loss": [f.loss for f in found],
        "norm": [f.gradient_norm for f in found],
        "gradients": gradients,
        "resident": trainer.resident,
        "pp": ranks.rank("pp"),
    }


def overflow(strategy: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """A step whose scaled gradients are infinite, then one with the scale that usually works."""
    run = run_of("gpt", strategy, training)
    ranks = ranks_of(run.plan, CPU)
    made = Trainer(run, Settings(warmup_steps=0, loss_scale=2.0**40), ranks)
    before = [p.detach().clone() for _, p in made.named]
    first = made.step(batch(0, *ranks.replica))
    same = all(torch.equal(whole(a), whole(p)) for a, (_, p) in zip(before, made.named))
    scale, made.scale = made.scale, 1024.0
    return {"skipped": [first.skipped, made.step(batch(1, *ranks.replica)).skipped], "same": same, "scale": scale}


def compiled(model: str, strategy: dict[str, Any], backend: str) -> dict[str, Any]:
    """Losses with compiled blocks, and how many graphs the compiler made of this rank's four layers."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = train(model, strategy, compile=backend)
    return {"loss": found["loss"], "graphs": counters["stats"]["unique_graphs"]}
