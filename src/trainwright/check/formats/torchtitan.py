"""torchtitan: TOML of releases before 0.3, and the same sections as flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...emit.torchtitan_plan import DEGREES, SCHEDULES
from ..document import Document, Path
from ..known import keys
from ..setup import Fact, Place, Reading
from . import Format
from ._facts import FRAMEWORK, Facts, flag, number, optimizer, plain, precision, schedule, text, unknown_keys, whole

SECTIONS = {
    "training",
    "parallelism",
    "model",
    "optimizer",
    "checkpoint",
    "job",
    "metrics",
    "profiling",
    "activation_checkpoint",
    "lr_scheduler",
    "compile",
    "experimental",
}
OLD = {"dp_shard": "data_parallel_degree", "etp": "expert_tensor_parallel_degree"}


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax not in ("toml", "shell", "yaml") or not isinstance(data, Mapping):
        return 0.0
    tables = {k for k, v in data.items() if isinstance(v, Mapping)}
    training = data.get("training")
    words = {plain(k) for k in training} if isinstance(training, Mapping) else set()
    own = {
        "local_batch_size",
        "seq_len",
        "batch_size",
        "steps",
        "data_parallel_shard_degree",
        "mixed_precision_param",
        "data_parallel_degree",
        "max_norm",
    } & words
    own |= {k for k in ("parallelism", "experimental", "activation_checkpoint") if k in tables}
    if "orchestrator" in tables or "inference" in tables or len(own) < 2 or len(SECTIONS & tables) < 2:
        return 0.0
    return 0.9


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    launch = document.syntax == "shell"
    facts = Facts(document, rank=2 if launch else 0)
    say(facts)
    if launch:
        _modes(facts)
    unknown: tuple[Path, ...] = () if launch else unknown_keys(document, keys("torchtitan"))
    return facts.reading("torchtitan", unknown=unknown)


def _modes(facts: Facts) -> None:
    """``activation-checkpoint:full``: a mode of a config as a word of the command line (0.3)."""
    layer = facts.document.detail
    for word in [*layer.words, *(v for o in layer.options for v in o.values)]:
        name, colon, mode = str(word).partition(":")
        if name == "activation-checkpoint" and colon:
            facts.found.append(Fact("strategy.recompute", _mode(mode), Place(facts.document.name, word.line), mode, facts.rank))


def say(facts: Facts, *above: str) -> None:
    """The facts of torchtitan's sections that stand at `above`."""
    facts.say(FRAMEWORK, "fsdp2", facts.path(*above, "parallelism") or facts.path(*above, "training"))
    for axis, key in {**DEGREES, "etp": OLD["etp"]}.items():
        old = [(*above, s, k) for s in ("training", "experimental") for k in (key, OLD.get(axis, key))]
        facts.take(f"strategy.{axis}", whole, (*above, "parallelism", key), *old)
    facts.table(
        (
            ("strategy.micro_batch_size", whole, ((*above, "training", "local_batch_size"), (*above, "training", "batch_size"))),
            ("training.global_batch_size", whole, ((*above, "training", "global_batch_size"),)),
            ("training.seq_len", whole, ((*above, "training", "seq_len"),)),
            ("training.steps", whole, ((*above, "training", "steps"),)),
            ("training.clip", number, ((*above, "training", "max_norm"),)),
            ("training.warmup_steps", whole, ((*above, "lr_scheduler", "warmup_steps"), (*above, "training", "warmup_steps"))),
            ("training.lr_schedule", schedule, ((*above, "lr_scheduler", "decay_type"),)),
            ("training.learning_rate", number, ((*above, "optimizer", "lr"),)),
            ("training.optimizer", optimizer, ((*above, "optimizer", "name"),)),
            ("strategy.recompute", _mode, ((*above, "activation_checkpoint", "mode"),)),
            ("strategy.compile", flag, ((*above, "compile", "enable"), (*above, "training", "compile"))),
            (
                "strategy.schedule",
                _schedule,
                ((*above, "parallelism", "pipeline_parallel_schedule"), (*above, "experimental", "pipeline_parallel_schedule")),
            ),
            ("strategy.sharding", _reshard, ((*above, "parallelism", "fsdp_reshard_after_forward"),)),
            ("model.flavor", text, ((*above, "model", "flavor"),)),
            ("model.name", text, ((*above, "model", "name"),)),
        )
    )
    facts.take("strategy.sequence_parallel", flag, (*above, "parallelism", "enable_sequence_parallel"))
    wide = facts.path(*above, "training", "mixed_precision_param")
    if wide:
        facts.say("training.precision", precision(facts.get(*above, "training", "mixed_precision_param")), wide)
    inner = facts.path(*above, "parallelism", "pipeline_parallel_microbatch_size")
    if inner and any(f.field == "strategy.pp" and f.value > 1 for f in facts.found):
        facts.say(
            "strategy.micro_batch_size",
            whole(facts.get(*above, "parallelism", "pipeline_parallel_microbatch_size")),
            inner,
            rank=facts.rank + 1,
        )
    if flag(facts.get(*above, "training", "enable_cpu_offload")):
        facts.say("strategy.offload", "params-cpu", facts.path(*above, "training", "enable_cpu_offload"))


def _mode(value: Any) -> str | None:
    return value if value in ("none", "selective", "full") else None


def _schedule(value: Any) -> str | None:
    return {v.lower(): k for k, v in SCHEDULES.items()}.get(str(value).lower())


def _reshard(value: Any) -> str | None:
    return {"never": "zero2", "always": "zero3", "default": "zero3"}.get(str(value))


FORMAT = Format(
    "torchtitan", "torchtitan", recognizes, read, ("titan",), "pytorch/torchtitan config/job_config.py (0.2), config/configs.py (0.3)"
)
