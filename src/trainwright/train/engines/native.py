"""PyTorch's own wrappers, put on as the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SpecError
from ...resolve import Run
from ..settings import Settings
from .base import Engine

if TYPE_CHECKING:
    from ..mesh import Ranks
    from ..step import Trainer


OFFLOADS = ("params-cpu", "optimizer-cpu")  # FSDP2's CPUOffloadPolicy


def check(run: Run, settings: Settings, on_gpu: bool) -> None:
    """FSDP1 is not run, and only FSDP2 shards gradients and parameters: another framework's plan would be run unsharded, without a word; so would adapters
    be trained whole."""
    s, job = run.plan.structure, run.job
    if job.method != "full":
        raise SpecError(f"{job.method} is only planned here: all weights are trained", "training.method", ["full"])
    if job.dropout:
        raise SpecError("nothing is dropped out here", "training.dropout", [0])
    for what, where, asked, nearest in (
        ("an optimizer in backward", "training.optimizer_in_backward", job.optimizer_in_backward, "false"),
        ("overlapped tensor parallelism", "strategy.async_tp", s.async_tp, "false"),
        ("graphs of launches", "strategy.cuda_graphs", s.cuda_graphs, "false"),
        (
            f"offload {s.offload}",
            "strategy.offload",
            s.offload not in ("none", *(OFFLOADS if s.framework == "fsdp2" and s.sharding != "none" else ())),
            "none",
        ),
    ):
        if asked:
            raise SpecError(f"{what} is only planned here", where, [nearest])
    if run.plan.etp > 1:
        raise SpecError(f"etp {run.plan.etp} is only planned here: every expert is whole on its rank", "strategy.etp", [1])
    if s.framework == "fsdp1" and s.sharding == "none":
        raise SpecError(
            "fsdp1 with none: PyTorch's own engine runs replicas as DDP or FSDP2", "strategy.framework", ["strategy.framework = ddp"]
        )
    if s.sharding in ("zero2", "zero3") and s.framework != "fsdp2":
        raise SpecError(
            f"{s.framework} with {s.sharding}: PyTorch's own engine shards gradients and parameters with FSDP2 only",
            "strategy.framework",
            "strategy.framework = fsdp2" + (", or --engine deepspeed" if s.framework == "deepspeed" else ""),
        )


def trainer(run: Run, settings: Settings, ranks: Ranks, folder: Path | None) -> Trainer:
    from ..adopt import maker_of
    from ..step import Trainer

    return Trainer(run, settings, ranks, maker_of(settings.model_from) if settings.model_from else None)


ENGINE = Engine(
    name="native",
    title="PyTorch",
    check=check,
    trainer=trainer,
    frameworks=("fsdp2", "ddp", "megatron"),
    aliases=("pytorch", "torch"),
)
