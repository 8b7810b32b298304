"""Hugging Face's TrainingArguments as JSON, YAML or command line, with TRL's and common scripts' own keys beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import (
    FRAMEWORK,
    Facts,
    attention,
    dig,
    flag,
    launched,
    misspelt,
    number,
    optimizer,
    plain,
    schedule,
    share,
    text,
    unknown_keys,
    whole,
)
from .deepspeed import stage

OWN = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_ratio",
    "warmup_steps", "gradient_checkpointing", "save_strategy", "save_steps", "logging_steps", "eval_strategy", "evaluation_strategy", "output_dir",
    "per_device_eval_batch_size", "bf16", "fp16", "report_to", "weight_decay", "max_grad_norm", "model_name_or_path", "deepspeed", "fsdp",
    "fsdp_config", "optim",
    "overwrite_output_dir", "do_train", "save_total_limit", "logging_strategy", "dataloader_num_workers", "per_gpu_train_batch_size",
)  # fmt: skip
TRL = (
    "model_name_or_path", "torch_dtype", "attn_implementation", "max_seq_length", "max_length", "packing", "dataset_name",
    "dataset_mixer", "use_peft", "lora_r", "load_in_4bit",
    "max_prompt_length", "max_completion_length", "beta", "num_generations", "dataset_text_field", "dataset_config", "use_vllm", "loss_type",
)  # fmt: skip


def recognizes(document: Document) -> float:
    found = share(document, OWN)
    if launched(document, "program"):
        strong = share(
            document,
            ("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "model_name_or_path", "lr_scheduler_type"),
        )
        return 0.0 if found < 2 or not strong else min(0.8, 0.4 + found / 30)
    if (
        document.syntax not in ("yaml", "json", "toml")
        or found < 3
        or "zero_optimization" in document.data
        or "log_history" in document.data
    ):
        return 0.0
    return min(0.75, 0.35 + found / 20)


def recognizes_trl(document: Document) -> float:
    base = recognizes(document)
    return base + 0.05 if base and share(document, TRL) >= 3 else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document, rank=2 if document.syntax == "shell" else 0)
    say(facts)
    listed = keys("trainer")
    unknown = misspelt(unknown_keys(document, listed, plain), listed.of())
    return facts.reading("trainer", unknown=unknown)


def read_trl(document: Document, context: Mapping[str, Any]) -> Reading:
    found = read(document, context)
    unknown = tuple(p for p in found.unknown if plain(p[-1]) not in keys("trl").of())
    return Reading(document, "trl", found.facts, unknown, found.open, found.fragment)


def say(facts: Facts) -> None:
    """The facts that these arguments hold, wherever they stand at the top of a document."""
    facts.table(
        (
            ("strategy.micro_batch_size", whole, ("per_device_train_batch_size", "per_gpu_train_batch_size")),
            ("training.accumulation", whole, ("gradient_accumulation_steps",)),
            ("training.learning_rate", number, ("learning_rate",)),
            ("training.clip", number, ("max_grad_norm",)),
            ("training.steps", whole, ("max_steps",)),
            ("training.warmup_steps", _steps, ("warmup_steps",)),
            ("training.warmup_share", _share, ("warmup_ratio", "warmup_steps")),
            ("training.lr_schedule", schedule, ("lr_scheduler_type", "lr_scheduler")),
            ("training.least_learning_rate", number, (("lr_scheduler_kwargs", "min_lr"),)),
            ("training.optimizer", optimizer, ("optim",)),
            ("training.seq_len", whole, ("max_seq_length", "model_max_length", "max_length", "cutoff_len", "block_size", "max_len")),
            ("training.packing", flag, ("packing",)),
            ("model.name", text, ("model_name_or_path", "model_name", "base_model", "pretrain")),
            ("strategy.attention", attention, ("attn_implementation", "flash_attn")),
            ("strategy.compile", flag, ("torch_compile",)),
            ("launch.timeout_s", number, ("ddp_timeout",)),
        )
    )
    switches(facts)
    sharding(facts)
    adapter(facts)


def _steps(value: Any) -> float | int | None:
    """Below 1 a share of the run, which is no number of steps."""
    found = number(value)
    return found if found is not None and (found >= 1 or found == 0) else None


def _share(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and 0 < found < 1 else None


def switches(facts: Facts) -> None:
    for name in ("bf16", "fp16"):
        path = facts.path(name)
        if path and flag(dig(facts.document.data, path)):
            facts.say("training.precision", name, path)
    for name, field, value in (
        ("gradient_checkpointing", "strategy.recompute", "full"),
        ("activation_checkpointing", "strategy.recompute", "full"),
        ("use_liger_kernel", "training.loss", "fused"),
    ):
        path = facts.path(name)
        on = flag(dig(facts.document.data, path)) if path else None
        if path and on:
            facts.say(field, value, path)
        elif path and on is False and field == "strategy.recompute":
            facts.say(field, "none", path)
    if facts.has("group_by_length") and flag(facts.get("group_by_length")):
        facts.say("training.packing", False, facts.path("group_by_length"))


def sharding(facts: Facts) -> None:
    fsdp, config = facts.get("fsdp"), facts.get("fsdp_config")
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    if words and flag(fsdp) is not False:
        table = config if isinstance(config, Mapping) else {}
        version = number(table.get("version", table.get("fsdp_version")))
        facts.say(FRAMEWORK, "fsdp2" if version == 2 else "fsdp1", facts.path("fsdp"))
        strategy = {
            "full_shard": "zero3",
            "shard_grad_op": "zero2",
            "hybrid_shard_zero2": "zero2",
            "hybrid_shard": "zero3",
            "no_shard": "none",
        }
        facts.say(
            "strategy.sharding", next((v for k, v in strategy.items() if k in words), "zero3" if flag(fsdp) else None), facts.path("fsdp")
        )
        if "offload" in words:
            facts.say("strategy.offload", "params-cpu", facts.path("fsdp"))
        _fsdp_config(facts)
    elif facts.has("deepspeed") and facts.get("deepspeed") not in (None, False, "", "None", "none", "null"):
        facts.say(FRAMEWORK, "deepspeed", facts.path("deepspeed"))
        named = re.search(r"z(?:ero)?[_-]?(?:stage[_-]?)?([0-3])(?!\d)", str(facts.get("deepspeed")).lower().rpartition("/")[2])
        if named:  # the file itself says so where it is given; its name is better than nothing
            facts.say("strategy.sharding", stage(named.group(1)), facts.path("deepspeed"), rank=-2)
    elif facts.has("per_device_train_batch_size"):
        facts.say(FRAMEWORK, "ddp", facts.path("per_device_train_batch_size"), rank=-2)
        facts.say("strategy.sharding", "none", facts.path("per_device_train_batch_size"), rank=-2)


def _fsdp_config(facts: Facts) -> None:
    """The switches of the table beside ``fsdp``; they win over its words."""
    for name, field, on, off in (
        ("reshard_after_forward", "strategy.sharding", "zero3", "zero2"),
        ("activation_checkpointing", "strategy.recompute", "full", None),
        ("cpu_offload", "strategy.offload", "params-cpu", None),
        ("offload_params", "strategy.offload", "params-cpu", None),
    ):
        path = facts.path("fsdp_config", name) or facts.path("fsdp_config", f"fsdp_{name}")
        value = flag(dig(facts.document.data, path)) if path else None
        found = {True: on, False: off, None: None}[value]
        if path and found and not (field == "strategy.sharding" and isinstance(facts.get("fsdp"), (str, list))):
            kept = [f for f in facts.found if f.field != field or f.place.path != facts.path("fsdp")]
            facts.found[:] = kept
            facts.say(field, found, path)


def adapter(facts: Facts) -> None:
    """LoRA, where something switches it on."""
    on = any(flag(facts.get(n)) for n in ("use_peft", "lora_enable", "use_lora", "qlora", "use_qlora", "q_lora", "peft", "lora"))
    on = on or str(facts.get("finetuning_type") or facts.get("adapter") or "").lower() in ("lora", "qlora")
    if not on:
        return
    path = next(
        p
        for n in ("use_peft", "lora_enable", "use_lora", "qlora", "use_qlora", "q_lora", "peft", "lora", "finetuning_type", "adapter")
        if (p := facts.path(n))
    )
    four = flag(facts.get("load_in_4bit")) or number(facts.get("quantization_bit") or facts.get("bits")) == 4
    four = bool(four or flag(facts.get("q_lora")) or flag(facts.get("qlora")) or str(facts.get("adapter")).lower() == "qlora")
    facts.say("training.method", "qlora" if four else "lora", path)
    facts.take("training.lora_rank", whole, "lora_r", "lora_rank", "r")


FORMAT = (
    Format("trainer", "Hugging Face TrainingArguments", recognizes, read, ("hf", "transformers"), "transformers 5.24 training_args.py"),
    Format("trl", "TRL and recipes", recognizes_trl, read_trl, ("trl-recipe",), "trl trainer/*_config.py, scripts/utils.py"),
)
