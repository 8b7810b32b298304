"""nanotron: one YAML with ``parallelism``, ``tokens``, ``model.model_config`` and ``optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import Facts, dig, flag, model, number, plain, precision, schedule, text, unknown_keys, whole


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax != "yaml" or not isinstance(data, Mapping):
        return 0.0
    degrees, tokens = data.get("parallelism"), data.get("tokens")
    own = isinstance(degrees, Mapping) and {"dp", "tp", "pp"} <= degrees.keys()
    return 0.97 if own and isinstance(tokens, Mapping) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    for axis, key in (("dp", "dp"), ("tp", "tp"), ("pp", "pp"), ("cp", "context_parallel_size"), ("ep", "expert_parallel_size")):
        facts.take(f"strategy.{axis}", whole, ("parallelism", key))
    model(facts, "model", "model_config")
    scheduler = ("optimizer", "learning_rate_scheduler")
    facts.table(
        (
            ("strategy.micro_batch_size", whole, (("tokens", "micro_batch_size"),)),
            ("training.accumulation", whole, (("tokens", "batch_accumulation_per_replica"),)),
            ("training.seq_len", whole, (("tokens", "sequence_length"),)),
            ("training.steps", whole, (("tokens", "train_steps"),)),
            ("training.clip", number, (("optimizer", "clip_grad"),)),
            ("training.learning_rate", number, ((*scheduler, "learning_rate"),)),
            ("training.warmup_steps", number, ((*scheduler, "lr_warmup_steps"),)),
            ("training.lr_schedule", schedule, ((*scheduler, "lr_decay_style"),)),
            ("training.least_learning_rate", number, ((*scheduler, "min_decay_lr"),)),
            ("training.decay_steps", number, ((*scheduler, "lr_decay_steps"),)),
            ("training.precision", precision, (("model", "dtype"),)),
            ("strategy.sharding", _sharding, (("optimizer", "zero_stage"),)),
            ("strategy.schedule", lambda v: {"1f1b": "1f1b", "afab": "gpipe"}.get(str(v).lower()), (("parallelism", "pp_engine"),)),
            ("strategy.recompute", _recompute, (("parallelism", "recompute_granularity"),)),
            ("training.optimizer", _optimizer, (("optimizer", "optimizer_factory", "name"),)),
        )
    )
    mode = facts.path("parallelism", "tp_mode")
    if mode and text(dig(document.data, mode)):
        facts.say("strategy.sequence_parallel", dig(document.data, mode).upper() == "REDUCE_SCATTER", mode)
    path = facts.path("optimizer", "accumulate_grad_in_fp32")
    if path and flag(dig(document.data, path)):
        facts.say("training.gradient_dtype", "fp32", path)
    return facts.reading("nanotron", unknown=unknown_keys(document, keys("nanotron"), plain))


def _sharding(value: Any) -> str | None:
    return {0: "none", 1: "zero1"}.get(number(value))  # type: ignore[arg-type]


def _recompute(value: Any) -> str | None:
    return {"SELECTIVE": "selective", "FULL": "full"}.get(str(value).upper())


def _optimizer(value: Any) -> str | None:
    return {"adamw": "adamw", "adamW": "adamw", "sgd": "sgd"}.get(str(value))


FORMAT = Format("nanotron", "nanotron", recognizes, read, ("nanotron-yaml",), "huggingface/nanotron src/nanotron/config/config.py")
