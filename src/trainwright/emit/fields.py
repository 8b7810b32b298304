"""Which fields of a run spec a target says, limits or leaves."""

from __future__ import annotations

from typing import Any

from ..resolve import Run
from ..spec.run import StrategySection, TrainingSection
from .base import Limit, Target

# About the software's age, the data and what else is on the card: no engine has a key for them.
FACTS = ("strategy.framework_date", "strategy.reserved_gb", "training.mean_document_len")
ALL = tuple(
    f"{section}.{name}" for section, form in (("training", TrainingSection), ("strategy", StrategySection)) for name in form.model_fields
)
DEFAULTS: dict[str, Any] = {
    "training.autocast": False,
    "training.dropout": 0.0,
    "training.packing": False,
    "training.optimizer_in_backward": False,
    "training.loss": "plain",
    "training.loss_chunks": 8,
    "training.lora_rank": 16,
    "training.method": "full",
    "training.optimizer_kernel": "fused",
    "strategy.tp": 1,
    "strategy.pp": 1,
    "strategy.cp": 1,
    "strategy.ep": 1,
    "strategy.etp": 1,
    "strategy.dp_replicate": 1,
    "strategy.virtual_stages": 1,
    "strategy.schedule": "1f1b",
    "strategy.cp_kind": "ring",
    "strategy.async_tp": False,
    "strategy.cuda_graphs": False,
    "strategy.sequence_parallel": False,
    "strategy.recompute": "none",
    "strategy.recompute_every": 1,
    "strategy.offload": "none",
    "strategy.reshard_root": True,
    "strategy.fp8_params": False,
    "strategy.compile": False,
    "strategy.options": {},
}


def engine_of(target: Target, run: Run) -> Target | None:
    """The engine whose files a launcher, or a front end, writes beside its own."""
    return target.engine(run) if target.engine is not None else None


def limits(target: Target, run: Run) -> tuple[Limit, ...]:
    engine = engine_of(target, run)
    return target.limits + (limits(engine, run) if engine else ())


def says(target: Target, run: Run) -> tuple[str, ...]:
    engine = engine_of(target, run)
    return target.says + (says(engine, run) if engine else ())


def left(target: Target, run: Run) -> tuple[str, ...]:
    """Fields that no file of the set holds."""
    engine = engine_of(target, run)
    held = set(says(target, run))
    both = target.leaves + (left(engine, run) if engine else ())
    return tuple(f for f in ALL if f in both and f not in held)
