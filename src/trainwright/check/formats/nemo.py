"""NeMo with Hydra (also NeuronX and HyperPod recipes): ``trainer`` and ``model``, as YAML or as overrides on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, model, number, optimizer, plain, precision, schedule, text, unknown_keys, whole
from ._interpolate import resolved

TRAINER = {
    "devices",
    "num_nodes",
    "gpus",
    "accelerator",
    "precision",
    "max_steps",
    "val_check_interval",
    "gradient_clip_val",
    "accumulate_grad_batches",
    "max_epochs",
}
MODEL = {
    "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size",
    "encoder_seq_length",
    "megatron_amp_O2", "activations_checkpoint_granularity", "optim", "data", "tokenizer", "language_model", "train_ds", "validation_ds",
    "train_batch_size",
}  # fmt: skip
PARALLEL = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}  # fmt: skip


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax not in ("yaml", "json", "shell") or not isinstance(data, Mapping):
        return 0.0
    trainer, inner = data.get("trainer"), data.get("model")
    one = len(TRAINER & trainer.keys()) if isinstance(trainer, Mapping) else 0
    two = len(MODEL & inner.keys()) if isinstance(inner, Mapping) else 0
    if (
        (one and two >= 2)
        or (one >= 2 and ("exp_manager" in data or "distributed_strategy" in data))
        or (one >= 1 and two >= 1 and document.syntax == "shell")
    ):
        return 0.85
    return 0.7 if two >= 4 and isinstance(inner, Mapping) and "_target_" not in inner else 0.0


def recognizes_hyperpod(document: Document) -> float:
    data = document.data
    if document.syntax != "yaml" or not isinstance(data, Mapping):
        return 0.0
    defaults = str(data.get("defaults") or "")
    own = (
        "hydra_config" in defaults
        or "training_config" in data
        or "recipes" in data
        or "instance_types" in data
        or "hyperpod" in str(data.get("container") or "")
    )
    return 0.9 if own and ("trainer" in data or "run" in data) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    return _read(document, "nemo")


def read_hyperpod(document: Document, context: Mapping[str, Any]) -> Reading:
    return _read(document, "hyperpod")


def _read(document: Document, name: str) -> Reading:
    launch = document.syntax == "shell"
    facts = Facts(resolved(document), rank=2 if launch else 0)
    for axis, key in PARALLEL.items():
        facts.take(f"strategy.{axis}", whole, ("model", key), ("distributed_strategy", key), ("trainer", "strategy", key))
    model(facts, "model")
    if any(f.field.startswith("strategy.") for f in facts.found):
        facts.say(FRAMEWORK, "megatron", facts.path("model", "tensor_model_parallel_size") or facts.path("model"), rank=facts.rank)
    facts.table(
        (
            ("launch.nodes", whole, (("trainer", "num_nodes"),)),
            ("launch.gpus_per_node", _devices, (("trainer", "devices"), ("trainer", "gpus"))),
            ("training.accumulation", whole, (("trainer", "accumulate_grad_batches"),)),
            ("training.steps", whole, (("trainer", "max_steps"),)),
            ("training.clip", number, (("trainer", "gradient_clip_val"),)),
            ("training.precision", precision, (("trainer", "precision"), ("model", "precision"))),
            ("strategy.micro_batch_size", whole, (("model", "micro_batch_size"), ("data", "micro_batch_size"),
                ("model", "data", "micro_batch_size"), ("model", "train_batch_size"))),
            ("training.global_batch_size", whole, (
                ("model", "global_batch_size"), ("data", "global_batch_size"), ("model", "data", "global_batch_size"),
                    ("training_config", "training_args", "train_batch_size"),
            )),
            ("training.seq_len", whole, (("model", "encoder_seq_length"), ("model", "data", "seq_length"), ("data", "seq_length"),
                ("model", "max_context_width"))),
            ("training.learning_rate", number, (("model", "optim", "lr"),)),
            ("training.optimizer", optimizer, (("model", "optim", "name"),)),
            ("training.warmup_steps", whole, (("model", "optim", "sched", "warmup_steps"),)),
            ("training.decay_steps", whole, (("model", "optim", "sched", "max_steps"),)),
            ("training.lr_schedule", schedule, (("model", "optim", "sched", "name"),)),
            ("training.least_learning_rate", number, (("model", "optim", "sched", "min_lr"),)),
            ("strategy.virtual_stages", whole, (("model", "virtual_pipeline_model_parallel_size"),
                ("distributed_strategy", "virtual_pipeline_model_parallel_size"))),
            ("strategy.recompute", _recompute, (("model", "activations_checkpoint_granularity"),)),
            ("model.name", text, (
                ("training_config", "model_config", "model_name_or_path"), ("model", "hf_model_name_or_path"), ("restore_from_path",),
                    ("model", "restore_from_path"),
            )),
        )
    )  # fmt: skip
    _switches(facts)
    fragment = launch or "defaults" in document.data or not (facts.has("trainer") and facts.has("model"))
    unknown = unknown_keys(facts.document, keys("nemo"), plain) if name == "nemo" else ()  # recipes of others have tables of their own
    return facts.reading(name, unknown=unknown, fragment=fragment)


def _switches(facts: Facts) -> None:
    for table in ("model", "distributed_strategy"):
        path = facts.path(table, "sequence_parallel")
        facts.say("strategy.sequence_parallel", flag(dig(facts.document.data, path)) if path else None, path)
    path = facts.path("model", "fp8")
    if path and flag(dig(facts.document.data, path)):
        facts.say("training.precision", "fp8", path)
    for table, key in (("model", "use_flash_attention"), ("model", "flash_attention")):
        path = facts.path(table, key)
        if path and flag(dig(facts.document.data, path)):
            facts.say("strategy.attention", "flash", path)
    if "distributed" in str(facts.get("model", "optim", "name") or ""):
        facts.say("strategy.sharding", "zero1", facts.path("model", "optim", "name"))
    path = facts.path("distributed_strategy", "zero1")
    if path and flag(dig(facts.document.data, path)):
        facts.say("strategy.sharding", "zero1", path)


def _devices(value: Any) -> int | None:
    """A count, or a list of numbers."""
    return len(value) if isinstance(value, list) and value else whole(value)


def _recompute(value: Any) -> str | None:
    return value if value in ("full", "selective") else None


SOURCE = "NVIDIA-NeMo/NeMo examples/nlp/language_modeling/conf; aws/sagemaker-hyperpod-recipes"
FORMAT = (
    Format("nemo", "NeMo with Hydra", recognizes, read, ("nemo-hydra", "neuronx"), SOURCE),
    Format("hyperpod", "SageMaker HyperPod recipe", recognizes_hyperpod, read_hyperpod, ("sagemaker-hyperpod",), SOURCE),
)
