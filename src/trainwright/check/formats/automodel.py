"""NeMo Automodel: ``step_scheduler``, ``distributed``, ``model._target_``; and Megatron-Bridge: ``train``, ``model``, ``ddp``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, model, number, optimizer, plain, precision, schedule, text, unknown_keys, whole
from ._interpolate import resolved
from .nemo import PARALLEL

FRAMEWORKS = {"fsdp2": "fsdp2", "ddp": "ddp", "megatron_fsdp": "megatron", "nvfsdp": "megatron"}


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax not in ("yaml", "json") or not isinstance(data, Mapping):
        return 0.0
    own = sum(k in data for k in ("step_scheduler", "dist_env", "distributed", "recipe"))
    inner = data.get("model")
    automodel = isinstance(inner, Mapping) and "nemo_automodel" in str(inner.get("_target_") or "")
    return 0.97 if ("step_scheduler" in data and own >= 2) or (automodel and own) else 0.0


def recognizes_bridge(document: Document) -> float:
    data = document.data
    if not isinstance(data, Mapping) or document.syntax not in ("yaml", "shell"):
        return 0.0
    train, inner = data.get("train"), data.get("model")
    sizes = isinstance(train, Mapping) and {"global_batch_size", "micro_batch_size", "train_iters"} & train.keys()
    degrees = isinstance(inner, Mapping) and (
        {*PARALLEL.values(), "seq_length"} & inner.keys() or "megatron.bridge" in str(inner.get("_target_"))
    )
    return 0.9 if sizes and (degrees or "ddp" in data or "scheduler" in data) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(resolved(document))
    for axis in ("tp", "cp", "pp", "ep", "dp"):
        facts.take(f"strategy.{axis}", whole, ("distributed", f"{axis}_size"), ("parallelizer", f"{axis}_size"))
    facts.take("strategy.dp_replicate", whole, ("distributed", "dp_replicate_size"))
    strategy = facts.path("distributed", "strategy") or facts.path("distributed", "_target_")
    name = str(dig(facts.document.data, strategy)).rpartition(".")[2].lower() if strategy else ""
    facts.say(FRAMEWORK, next((v for k, v in FRAMEWORKS.items() if k.replace("_", "") in name.replace("_", "")), None), strategy)
    facts.table(
        (
            ("strategy.micro_batch_size", whole, (("step_scheduler", "local_batch_size"), ("dataloader", "batch_size"))),
            ("training.global_batch_size", whole, (("step_scheduler", "global_batch_size"),)),
            ("training.accumulation", whole, (("step_scheduler", "grad_acc_steps"),)),
            ("training.steps", whole, (("step_scheduler", "max_steps"),)),
            ("training.learning_rate", number, (("optimizer", "lr"),)),
            ("training.optimizer", optimizer, (("optimizer", "_target_"),)),
            ("training.clip", number, (("clip_grad_norm", "max_norm"), ("training", "max_grad_norm"))),
            ("training.warmup_steps", number, (("lr_scheduler", "lr_warmup_steps"),)),
            ("training.lr_schedule", schedule, (("lr_scheduler", "lr_decay_style"),)),
            ("training.least_learning_rate", number, (("lr_scheduler", "min_lr"),)),
            ("training.seq_len", whole, (("packed_sequence", "packed_sequence_size"), ("dataset", "seq_len"), ("dataset", "seq_length"))),
            ("model.name", text, (("model", "pretrained_model_name_or_path"), ("model", "config", "pretrained_model_name_or_path"))),
            ("training.precision", precision, (("model", "torch_dtype"),)),
            ("launch.nodes", whole, (("ci", "nodes"), ("slurm", "nodes"))),
            ("launch.gpus_per_node", whole, (("slurm", "ntasks_per_node"),)),
        )
    )
    for path in (facts.path("distributed", "activation_checkpointing"),):
        if path and flag(dig(facts.document.data, path)):
            facts.say("strategy.recompute", "full", path)
    path = facts.path("distributed", "sequence_parallel")
    facts.say("strategy.sequence_parallel", flag(dig(facts.document.data, path)) if path else None, path)
    minutes = facts.path("dist_env", "timeout_minutes")
    value = number(dig(facts.document.data, minutes)) if minutes else None
    facts.say("launch.timeout_s", value * 60 if value is not None else None, minutes, value)
    if facts.has("peft"):
        facts.say("training.method", "qlora" if facts.has("quantization") else "lora", facts.path("peft"))
        facts.take("training.lora_rank", whole, ("peft", "dim"))
    return facts.reading("automodel", unknown=unknown_keys(facts.document, keys("automodel"), plain))


def read_bridge(document: Document, context: Mapping[str, Any]) -> Reading:
    launch = document.syntax == "shell"
    facts = Facts(resolved(document), rank=2 if launch else 0)
    facts.say(FRAMEWORK, "megatron", facts.path("model") or facts.path("train"))
    for axis, key in PARALLEL.items():
        facts.take(f"strategy.{axis}", whole, ("model", key))
    model(facts, "model")
    facts.table(
        (
            ("strategy.micro_batch_size", whole, (("train", "micro_batch_size"),)),
            ("training.global_batch_size", whole, (("train", "global_batch_size"),)),
            ("training.steps", whole, (("train", "train_iters"),)),
            ("training.seq_len", whole, (("model", "seq_length"), ("dataset", "sequence_length"), ("dataset", "seq_length"))),
            ("training.learning_rate", number, (("optimizer", "lr"),)),
            ("training.clip", number, (("optimizer", "clip_grad"),)),
            ("training.warmup_steps", number, (("scheduler", "lr_warmup_iters"),)),
            ("training.decay_steps", number, (("scheduler", "lr_decay_iters"),)),
            ("training.precision", precision, (("mixed_precision",), ("model", "params_dtype"))),
            ("strategy.recompute", lambda v: v if v in ("full", "selective") else None, (("model", "recompute_granularity"),)),
            ("strategy.virtual_stages", whole, (("model", "virtual_pipeline_model_parallel_size"),)),
        )
    )
    for table, key, field in (
        ("model", "sequence_parallel", "strategy.sequence_parallel"),
        ("model", "tp_comm_overlap", "strategy.async_tp"),
    ):
        path = facts.path(table, key)
        facts.say(field, flag(dig(facts.document.data, path)) if path else None, path)
    path = facts.path("ddp", "use_distributed_optimizer") or facts.path("optimizer", "use_distributed_optimizer")
    if path:
        facts.say("strategy.sharding", "zero1" if flag(dig(facts.document.data, path)) else "none", path)
    return facts.reading("megatron_bridge", fragment=True)


FORMAT = (
    Format(
        "automodel", "NeMo Automodel", recognizes, read, ("nemo-automodel",), "NVIDIA-NeMo/Automodel examples, nemo_automodel/components"
    ),
    Format(
        "megatron_bridge",
        "Megatron-Bridge",
        recognizes_bridge,
        read_bridge,
        ("megatron-bridge",),
        "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/config.py",
    ),
)
