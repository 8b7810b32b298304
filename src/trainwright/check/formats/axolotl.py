"""axolotl: one YAML of the model, the adapter, the data and the Trainer's arguments under its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format, trainer
from ._facts import FRAMEWORK, Facts, attention, flag, number, optimizer, plain, schedule, share, text, unknown_keys, whole

OWN = (
    "base_model", "sequence_len", "micro_batch_size", "datasets", "val_set_size", "sample_packing", "adapter", "num_epochs", "lr_scheduler",
    "pad_to_sequence_len",
    "train_on_inputs", "lora_r", "flash_attention", "evals_per_epoch", "saves_per_epoch", "dataset_prepared_path", "load_in_4bit", "plugins",
    "chat_template", "rl",
)  # fmt: skip


def recognizes(document: Document) -> float:
    found = share(document, OWN)
    strong = share(document, ("base_model", "sequence_len", "micro_batch_size", "sample_packing", "evals_per_epoch"))
    return (
        min(0.98, 0.6 + found / 30)
        if document.syntax in ("yaml", "json") and strong >= 1 and share(document, ("base_model",)) and found >= 4
        else 0.0
    )


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    facts.table(
        (
            ("strategy.micro_batch_size", whole, ("micro_batch_size",)),
            ("training.accumulation", whole, ("gradient_accumulation_steps",)),
            ("training.seq_len", whole, ("sequence_len",)),
            ("training.learning_rate", number, ("learning_rate",)),
            ("training.steps", whole, ("max_steps",)),
            ("training.warmup_steps", whole, ("warmup_steps",)),
            ("training.warmup_share", number, ("warmup_ratio",)),
            ("training.lr_schedule", schedule, ("lr_scheduler",)),
            ("training.clip", number, ("max_grad_norm",)),
            ("training.optimizer", optimizer, ("optimizer",)),
            ("training.packing", flag, ("sample_packing",)),
            ("model.name", text, ("base_model",)),
            ("strategy.attention", attention, ("attn_implementation", "flash_attention")),
            ("strategy.cp", whole, ("context_parallel_size", "sequence_parallel_degree")),
            ("strategy.tp", whole, ("tensor_parallel_size",)),
            ("strategy.dp_shard", whole, ("dp_shard_size",)),
            ("strategy.dp_replicate", whole, ("dp_replicate_size",)),
            ("strategy.compile", flag, ("torch_compile",)),
        )
    )
    trainer.switches(facts)
    _sharding(facts)
    trainer.adapter(facts)
    return facts.reading("axolotl", unknown=unknown_keys(document, keys("axolotl"), plain))


def _sharding(facts: Facts) -> None:
    config = facts.get("fsdp_config")
    if facts.get("fsdp") or (isinstance(config, Mapping) and config and not facts.get("deepspeed")):
        version = number(facts.get("fsdp_version")) or number(facts.get("fsdp_config", "fsdp_version"))
        path = facts.path("fsdp_version") or facts.path("fsdp") or facts.path("fsdp_config")
        facts.say(FRAMEWORK, "fsdp2" if version == 2 else "fsdp1", path)
        words = " ".join(map(str, facts.get("fsdp") or [])) if isinstance(facts.get("fsdp"), list) else str(facts.get("fsdp") or "")
        facts.say("strategy.sharding", "zero2" if "shard_grad_op" in words else "zero3", path)
        for name in ("offload_params", "fsdp_offload_params"):
            if flag(facts.get("fsdp_config", name)):
                facts.say("strategy.offload", "params-cpu", facts.path("fsdp_config", name))
    else:
        trainer.sharding(facts)


FORMAT = Format("axolotl", "axolotl", recognizes, read, ("axolotl-yaml",), "axolotl-ai-cloud/axolotl src/axolotl/utils/schemas")
