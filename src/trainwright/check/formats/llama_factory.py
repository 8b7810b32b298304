"""LLaMA-Factory: YAML, JSON or command line of its arguments, which contain the Trainer's; and its v1 files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format, trainer
from ._facts import FRAMEWORK, Facts, flag, launched, plain, share, text, unknown_keys, whole

OWN = (
    "stage", "finetuning_type", "template", "cutoff_len", "dataset", "model_name_or_path", "lora_target", "lora_rank", "preprocessing_num_workers",
    "overwrite_cache",
    "plot_loss", "do_train", "max_samples", "dataset_dir", "quantization_bit", "flash_attn", "pure_bf16", "val_size", "freeze_trainable_layers",
)  # fmt: skip
V1 = (
    "dist_config",
    "train_dataset",
    "kernel_config",
    "model_class",
    "quant_config",
    "peft_config",
    "init_config",
    "sample_backend",
    "batching_strategy",
)


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax == "shell" and not launched(document, "program"):
        return 0.0
    if share(document, V1) >= 3 and share(document, ("model", "train_dataset")) == 2:
        return 0.95
    if (
        share(document, ("stage", "finetuning_type", "template")) < 2
        or not isinstance(data, Mapping)
        or isinstance(data.get("stage"), (int, dict))
    ):
        return 0.0
    return min(0.97, 0.75 + share(document, OWN) / 60)


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document, rank=2 if document.syntax == "shell" else 0)
    v1 = share(document, V1) >= 3
    trainer.say(facts)
    if v1:
        facts.table(
            (
                ("strategy.micro_batch_size", whole, ("micro_batch_size",)),
                ("training.global_batch_size", whole, ("global_batch_size",)),
                ("model.name", text, ("model",)),
            )
        )
        name = facts.get("dist_config", "name")
        facts.say(FRAMEWORK, name if name in ("fsdp2", "deepspeed", "ddp") else None, facts.path("dist_config", "name"))
    if facts.has("pure_bf16") and flag(facts.get("pure_bf16")):
        facts.say("training.precision", "bf16", facts.path("pure_bf16"))
        facts.say("training.master_weights", "none", facts.path("pure_bf16"))
    if flag(facts.get("disable_gradient_checkpointing")):
        facts.say("strategy.recompute", "none", facts.path("disable_gradient_checkpointing"))
    elif not v1 and not facts.has("gradient_checkpointing"):
        # LLaMA-Factory switches it on by itself while training.
        facts.say("strategy.recompute", "full", facts.path("finetuning_type") or (), rank=-1)
    known = keys("llama_factory")
    listed = keys("trainer").of() | known.of()
    unknown = tuple(p for p in unknown_keys(document, known, plain) if plain(p[-1]) not in listed) if known.of() and not v1 else ()
    return facts.reading("llama_factory", unknown=unknown)


FORMAT = Format(
    "llama_factory", "LLaMA-Factory", recognizes, read, ("llamafactory", "llama-factory"), "hiyouga/LLaMA-Factory src/llamafactory/hparams"
)
