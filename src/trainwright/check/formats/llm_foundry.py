"""llm-foundry (MosaicML): YAML of a Composer run, older files under ``parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, number, optimizer, plain, precision, schedule, share, text, unknown_keys, whole
from ._interpolate import resolved

OWN = (
    "max_seq_len", "global_train_batch_size", "device_train_microbatch_size", "fsdp_config", "max_duration", "eval_interval", "precision",
    "train_loader",
    "eval_loader", "scheduler", "algorithms", "device_eval_batch_size", "tokenizer_name", "load_path", "save_interval", "progress_bar",
    "icl_tasks", "variables",
)  # fmt: skip


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax != "yaml" or not isinstance(data, Mapping):
        return 0.0
    inner = data.get("parameters")
    if isinstance(inner, Mapping) and len({plain(k) for k in inner} & set(OWN)) >= 4:
        return 0.95
    found, strong = (
        share(document, OWN),
        share(document, ("global_train_batch_size", "device_train_microbatch_size", "max_duration", "train_loader")),
    )
    return 0.94 if found >= 4 and strong >= 2 else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(resolved(document))
    at = ("parameters",) if facts.has("parameters", "train_loader") or facts.has("parameters", "max_duration") else ()
    loader = ("train_loader", "dataset", "max_seq_len")
    facts.table(
        (
            (
                "training.seq_len",
                whole,
                ((*at, "max_seq_len"), (*at, "variables", "max_seq_len"), (*at, "model", "max_seq_len"), (*at, *loader)),
            ),
            ("training.global_batch_size", whole, ((*at, "global_train_batch_size"), (*at, "variables", "global_train_batch_size"))),
            (
                "strategy.micro_batch_size",
                whole,
                ((*at, "device_train_microbatch_size"), (*at, "variables", "device_train_microbatch_size")),
            ),
            ("training.precision", precision, ((*at, "precision"),)),
            ("training.optimizer", optimizer, ((*at, "optimizer", "name"),)),
            ("training.learning_rate", number, ((*at, "optimizer", "lr"),)),
            ("training.steps", lambda v: _batches(v), ((*at, "max_duration"),)),
            ("training.lr_schedule", schedule, ((*at, "scheduler", "name"),)),
            ("training.warmup_steps", lambda v: _batches(v), ((*at, "scheduler", "t_warmup"),)),
            ("training.clip", number, ((*at, "algorithms", "gradient_clipping", "clipping_threshold"),)),
            ("strategy.sharding", _sharding, ((*at, "fsdp_config", "sharding_strategy"),)),
            ("model.name", text, ((*at, "model", "pretrained_model_name_or_path"), (*at, "variables", "model_name_or_path"))),
            ("model.hidden_size", whole, ((*at, "model", "d_model"),)),
            ("model.num_hidden_layers", whole, ((*at, "model", "n_layers"),)),
            ("model.num_attention_heads", whole, ((*at, "model", "n_heads"),)),
            ("model.vocab_size", whole, ((*at, "model", "vocab_size"),)),
            ("launch.world_size", whole, (("compute", "gpus"), ("gpu_num",))),
        )
    )
    if facts.has(*at, "fsdp_config"):
        facts.say(FRAMEWORK, "fsdp1", facts.path(*at, "fsdp_config"))
    path = facts.path(*at, "fsdp_config", "activation_checkpointing")
    if path:
        facts.say("strategy.recompute", "full" if flag(dig(facts.document.data, path)) else "none", path)
    if flag(facts.get(*at, "fsdp_config", "activation_cpu_offload")):
        facts.say("strategy.offload", "activations-cpu", facts.path(*at, "fsdp_config", "activation_cpu_offload"))
    return facts.reading("llm_foundry", unknown=unknown_keys(facts.document, keys("llm_foundry"), plain))


def _batches(value: Any) -> int | None:
    """``1000ba``; epochs and tokens are no steps."""
    return whole(value[:-2]) if isinstance(value, str) and value.endswith("ba") else None


def _sharding(value: Any) -> str | None:
    return {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "zero3", "NO_SHARD": "none"}.get(str(value).upper())


FORMAT = Format(
    "llm_foundry", "llm-foundry", recognizes, read, ("llm-foundry", "mosaic", "composer"), "mosaicml/llm-foundry scripts/train/yamls"
)
