"""What the tests of the DeepSpeed engine run on their ranks: all cases in one world, since DeepSpeed keeps its groups for the life of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts import CPU, batch, run_of, trainer

from trainwright.train.checkpoint import Checkpoints
from trainwright.train.deepspeed import DeepSpeedTrainer
from trainwright.train.engines import ENGINES
from trainwright.train.engines.deepspeed import config_of
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.watch import Watched as Native
from trainwright.train.watch import whole

STEPS = 3
Layout = dict[str, Any]


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
    own = made(model, strategy, training, **settings)
    found, gradients = [], {}
    for i in range(STEPS):
        found.append(own.step(batch(i, *own.ranks.replica)))
        gradients = gradients or own.gradients
    state = {k: v.numpy() for k, v in own.state().items()}
    memory = own.memory()
    own.engine.destroy()
    return {
        "loss": [f.loss for f in found],
        "norm": [f.gradient_norm for f in found],
        "gradients": gradients,
        "state": state,
        "memory": memory,
        "rank": dist.get_rank(),
    }


def one_device(model: str, **settings: Any) -> dict[str, Any]:
    """The same steps by PyTorch's engine on one rank, with what it keeps."""
    run = run_of(model, {"micro_batch_size": 8}, {"optimizer_kernel": "foreach"})
    chosen = Settings(**{"steps": STEPS, "warmup_steps": 0, "learning_rate": 1e-3, "eps": 1e-5, "device": "cpu", **settings})
    own = Native(run, chosen, ranks_of(run.plan, CPU))
    found = [own.step(batch(0))]
    gradients = {n: g.numpy() for n, g in own.gradients.items()}
    found += [own.step(batch(i)) for i in range(1, STEPS)]
    return {
        "loss": [f.loss for f in found],
        "norm": [f.gradient_norm for f in found],
        "gradients": gradients,
        "state": {k: whole(v).float().numpy() for k, v in own.state().items()},
    }


def moved(folder: str, model: str, before: Layout, after: Layout) -> dict[str, Any]:
    """Two steps in one layout, saved; two more in another, which begins anew and loads them. The first layout goes on too, to compare."""
    first = maker(before)(model, before, {"optimizer_kernel": "foreach"})
    for i in range(2):
        first.step(batch(i, *first.ranks.replica))
    checkpoints = Checkpoints(Path(folder), {}, group=dist.new_group(backend="gloo"))
    checkpoints.clean()
    checkpoints.save(2, first.state(), first.progress())
    checkpoints.wait()
    saved = {k: whole(v).clone() for k, v in first.state().items()}
    second = maker(after)(model, after, {"optimizer_kernel": "foreach"})
    second.expect()
    loaded = checkpoints.load(second.state())
    assert loaded is not None
    second.loaded(loaded.extra)
    back = {k: whole(v) for k, v in second.state().items()}
    both = saved.keys() & back.keys()
    answer = {
        "same": [k for k in both if not torch.equal(saved[k], back[k])],
        "compared": len(both),
        "steps": second.steps,
        "loss": [[t.step(batch(i, *t.ranks.replica)).loss for i in (2, 3)] for t in (first, second)],
    }
    checkpoints.close()
    for each in (first, second):
        if isinstance(each, DeepSpeedTrainer):
            each.engine.destroy()
    return answer


def maker(strategy: Layout) -> Any:
    return trainer if "framework" in strategy else made


def moves(folder: str, every: Mapping[str, tuple[str, Layout, Layout]]) -> dict[str, Any]:
    return each({name: lambda name=name, case=case: moved(f"{folder}/{name}", *case) for name, case in every.items()})


def cases(every: Mapping[str, tuple[str, Layout, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return each({name: lambda case=case: train(*case[:3], **case[3]) for name, case in every.items()})


def everything(folder: str, every: Any, these: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    os.environ.update(environment)
    return cases(every) | moves(folder, these)


def each(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each call found. The first that raises ends them: the ranks no longer agree on what comes next."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun does
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            raise AssertionError(name) from error
    return found
