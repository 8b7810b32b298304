"""Modules of one's own, as a stranger would bring them, and what ranks do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import CPU, batch, run_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.train.checkpoint import Checkpoints
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.step import Trainer
from trainwright.train.watch import Watched

CONFIG = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
CONFIG |= {"vocab_size": 256, "max_position_embeddings": 64}


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(**CONFIG))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits


class Split(Llama):
    """With a plan for tensor parallelism, and a loss of its own."""

    def tensor_parallel(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        column, row = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj", "self_attn.o_proj mlp.down_proj"
        found: dict[str, Any] = {f"inner.model.layers.*.{name}": ColwiseParallel() for name in column.split()}
        return found | {f"inner.model.layers.*.{name}": RowwiseParallel() for name in row.split()}

    def summed_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(chosen * (labels >= 0)).sum()


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def settings(**more: Any) -> Settings:
    return Settings(**{"steps": 3, "warmup_steps": 0, "learning_rate": 1e-3, "min_learning_rate": 1e-3, "eps": 1e-5, **more})


def train(model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    run = run_of("llama", strategy, training)
    ranks = ranks_of(run.plan, CPU)
    trainer = Watched(run, settings(**more), ranks, globals()[model])
    found = [trainer.step(batch(i, *ranks.replica)) for i in range(3)]
    gradients = {n: g.numpy() for n, g in trainer.gradients.items()}
    return {"loss": [f.loss for f in found], "gradients": gradients}


def their_loss() -> float:
    """transformers' own mean over the target tokens of the first batch, before any step."""
    torch.manual_seed(0)
    made, first = Llama(), batch(0)
    return float(nn.functional.cross_entropy(made(first.tokens).flatten(0, 1), first.labels.flatten()))


def resumed(folder: str, first: dict[str, Any], second: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3 in the layout `first`, and again in `second` from the checkpoint of step 1."""
    group, found = dist.new_group(backend="gloo"), []
    for strategy in (first, second):
        run = run_of("llama", strategy)
        ranks = ranks_of(run.plan, CPU)
        trainer = Trainer(run, settings(seed=len(found)), ranks, Llama)  # other weights than those that are loaded
        checkpoints = Checkpoints(Path(folder), {}, group=group)
        if found:
            trainer.expect()
            loaded = checkpoints.load(trainer.state())
            assert loaded is not None
            trainer.loaded(loaded.extra["progress"])
        else:
            trainer.step(batch(0, *ranks.replica))
            checkpoints.save(1, trainer.state(), {"progress": trainer.progress()})
            checkpoints.wait()
        found.append([trainer.step(batch(i, *ranks.replica)).loss for i in (1, 2)])
        checkpoints.close()
    return found[0], found[1]
