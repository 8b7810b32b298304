"""Which engine a launcher starts: the one that the plan's framework names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import deepspeed, fsdp, megatron, torchtitan, trainer
from .base import Files, Options, Target

LAUNCHERS = ("launch.sh", "launch_elastic.sh")


def engine_of(run: Run) -> Target:
    """megatron -> Megatron-LM; deepspeed -> DeepSpeed; fsdp2 -> the FSDP2 script, or torchtitan where the layout or the model need it;
    fsdp1 and ddp -> a program that takes Trainer's arguments."""
    framework = run.plan.structure.framework
    if framework == "fsdp2":
        return fsdp.TARGET if not _refused(run, fsdp.TARGET) or _refused(run, torchtitan.TARGET) else torchtitan.TARGET
    return {"megatron": megatron.TARGET, "deepspeed": deepspeed.TARGET}.get(framework, trainer.TARGET)


def _refused(run: Run, target: Target) -> bool:
    return any(not limit.allows(run) for limit in target.limits)


def files(run: Run, options: Options) -> Files:
    """The engine's files without its own launch scripts."""
    return {k: v for k, v in engine_of(run).write(run, options).items() if k not in LAUNCHERS}


def read(found: Mapping[str, str]) -> dict[str, Any] | None:
    """What the first engine that knows the files reads in them."""
    for target in (fsdp.TARGET, megatron.TARGET, torchtitan.TARGET, trainer.TARGET, deepspeed.TARGET):
        said = target.read(found)
        if said is not None:
            return said
    return None


def read_launched(found: Mapping[str, str], words: str, nodes: int | None, gpus: int | None) -> dict[str, Any] | None:
    """The engine's files read as if torchrun had started `words` on that many nodes and GPUs of a node."""
    line = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} {words}\n"
    held = {k: v for k, v in found.items() if k not in LAUNCHERS and k != "job.sbatch"}
    return read({**held, "launch.sh": line})
