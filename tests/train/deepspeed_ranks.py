"""What the tests of the DeepSpeed engine run on their ranks: all cases in one world, since DeepSpeed keeps its groups for the life of a process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from layouts import CPU, batch, run_of

from trainwright.train.deepspeed import DeepSpeedTrainer
from trainwright.train.engines import ENGINES
from trainwright.train.engines.deepspeed import config_of
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings

STEPS = 3


class Watched(DeepSpeedTrainer):
    """Remembers each step's whole gradients before they are clipped."""

    gradients: dict[str, np.ndarray]

    def _update(self) -> tuple[float, bool]:
        from deepspeed.utils import safe_get_full_grad

        self.gradients = {n: safe_get_full_grad(p).float().numpy().copy() for n, p in self.named}
        return super()._update()


def made(model: str, strategy: dict[str, Any], training: dict[str, Any], kind: type[DeepSpeedTrainer] = Watched, **settings: Any) -> Any:
    run = run_of(model, {"framework": "deepspeed", **strategy}, training)
    chosen = Settings(**{"steps": STEPS, "warmup_steps": 0, "learning_rate": 1e-3, "eps": 1e-5, "device": "cpu", **settings})
    ENGINES["deepspeed"].check(run, chosen, False)
    return kind(run, chosen, ranks_of(run.plan, CPU), config_of(run, chosen, None))


def train(model: str, strategy: dict[str, Any], training: dict[str, Any], **settings: Any) -> dict[str, Any]:
    trainer = made(model, strategy, training, **settings)
    found, gradients = [], {}
    for i in range(STEPS):
        found.append(trainer.step(batch(i, *trainer.ranks.replica)))
        gradients = gradients or trainer.gradients
    state = {k: v.numpy() for k, v in trainer.state().items()}
    trainer.engine.destroy()
    return {
        "loss": [f.loss for f in found],
        "norm": [f.gradient_norm for f in found],
        "gradients": gradients,
        "state": state,
        "memory": trainer.memory() if False else {},
        "rank": dist.get_rank(),
    }


def cases(every: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What each case found; of one that raised, the traceback, so that it hides no other."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun does
    found: dict[str, Any] = {}
    for name, (model, strategy, training, settings) in every.items():
        try:
            found[name] = train(model, strategy, training, **settings)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found
