"""Which keys of a run spec were said and change nothing: what a framework cannot do, and what needs another key beside it. One sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..spec.job import TrainingJob
from ..spec.precision import activation_bytes, activation_dtype
from ..spec.run import RunSpec, TrainingSection
from .base import Framework
from .dtypes import Dtypes

NEUTRAL = (None, False, "none", 0, 0.0)  # what asks for nothing, whatever the key


def without_effect(spec: RunSpec, framework: Framework, job: TrainingJob, types: Dtypes, *, moe: bool, gpus: int) -> tuple[str, ...]:
    """``training.autocast: true has no effect with ...`` for each; `types` are those on one of several ranks, `moe`: the model has experts."""
    said = {f"training.{k}": getattr(spec.training, k) for k in spec.training.model_fields_set}
    said |= {f"strategy.{k}": getattr(spec.strategy, k) for k in spec.strategy.model_fields_set}
    defaults = {f"training.{k}": field.default for k, field in TrainingSection.model_fields.items()} | {
        "strategy.reshard_root": True,
        "strategy.recompute_every": 1,
    }
    asked = {k: v for k, v in said.items() if v != defaults.get(k) and (v not in NEUTRAL or k == "strategy.reshard_root")}
    found = [*_of_framework(asked, framework, gpus), *_alone(asked, spec, job, moe)]
    if types.autocast and said.get("training.master_weights") == "none":
        found.append(("training.master_weights", "with training.autocast, whose weights are fp32"))
    if (nearest := _gradients(asked, framework, job, types)) is not None:
        found.append(("training.gradient_dtype", f"with {framework.title} here, whose gradients are reduced in {nearest}"))
    first = dict(reversed(found))  # one reason a key
    return tuple(f"{key}: {_word(said.get(key))} has no effect {first[key]}" for key in dict.fromkeys(key for key, _ in found))


def _of_framework(asked: dict[str, Any], framework: Framework, gpus: int) -> Iterator[tuple[str, str]]:
    for key, (why, values, several) in framework.ignores.items():
        if key in asked and (not values or asked[key] in values) and (gpus > 1 or not several):
            yield key, f"with {framework.title}, which {why}"


def _alone(asked: dict[str, Any], spec: RunSpec, job: TrainingJob, moe: bool) -> Iterator[tuple[str, str]]:
    """Keys that stand for nothing without another one."""
    needs = (
        ("training.packing", job.mean_document_len is not None, "without training.mean_document_len"),
        ("training.mean_document_len", job.packing, "without training.packing"),
        ("training.loss_chunks", job.loss == "chunked", f"with training.loss {job.loss}"),
        ("training.autocast", activation_bytes(job.precision) < 4, f"in training.precision {job.precision}"),
        ("training.fp8_recipe", job.precision in ("fp8", "fp4"), f"in training.precision {job.precision}"),
        ("training.lora_rank", job.method != "full", "with training.method full"),
        ("training.lora_targets", job.method != "full", "with training.method full"),
        ("training.base_quantization", job.method == "qlora", f"with training.method {job.method}"),
        ("training.moe_capacity_factor", moe, "in a model without experts"),
        ("strategy.recompute_every", spec.strategy.recompute in (None, "full"), f"with strategy.recompute {spec.strategy.recompute}"),
    )
    for key, useful, why in needs:
        if key in asked and not useful:
            yield key, why


def _gradients(asked: dict[str, Any], framework: Framework, job: TrainingJob, types: Dtypes) -> str | None:
    """The type that gradients are reduced in where another was asked for and the framework has no other; a default is no wish."""
    wanted = asked.get("training.gradient_dtype")
    if wanted is None or wanted == framework.defaults.get("gradient_dtype") or framework.memory.reduces == "any":
        return None
    reduced = job.gradient_dtype if types.mixed else "fp32" if types.reduced == 4 else activation_dtype(job.precision)
    return None if wanted == reduced else reduced


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
