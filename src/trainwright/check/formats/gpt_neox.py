"""GPT-NeoX: JSON or YAML whose keys have dashes or underscores, DeepSpeed's keys among them at the top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format, deepspeed
from ._facts import Facts, dig, flag, model, number, plain, schedule, share, unknown_keys, whole

OWN = (
    "pipe_parallel_size", "model_parallel_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
    "norm", "pos_emb",
    "no_weight_tying", "train_iters", "lr_decay_iters", "train_micro_batch_size_per_gpu", "zero_optimization", "attention_config",
    "checkpoint_activations", "data_impl",
    "rotary_pct", "gpt_j_residual", "scaled_upper_triang_masked_softmax_fusion", "partition_activations", "gas",
)  # fmt: skip


def recognizes(document: Document) -> float:
    if (
        document.syntax not in ("yaml", "json")
        or share(document, ("pipe_parallel_size", "num_layers", "pos_emb", "norm", "attention_config", "no_weight_tying")) < 2
    ):
        return 0.0
    found = share(document, OWN)
    return 0.0 if found < 5 else min(0.98, 0.6 + found / 30)


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    deepspeed.say(facts)
    model(facts)
    facts.table(
        (
            ("strategy.pp", whole, ("pipe_parallel_size",)),
            ("strategy.tp", whole, ("model_parallel_size",)),
            ("strategy.cp", whole, ("context_parallel_size",)),
            ("strategy.ep", whole, ("moe_expert_parallel_size",)),
            ("training.seq_len", whole, ("seq_length",)),
            ("training.steps", whole, ("train_iters",)),
            ("training.decay_steps", whole, ("lr_decay_iters",)),
            ("training.accumulation", whole, ("gas",)),
            ("training.lr_schedule", schedule, ("lr_decay_style",)),
            ("training.least_learning_rate", number, ("min_lr",)),
            ("training.warmup_share", number, ("warmup",)),
            ("training.precision", _precision, ("precision",)),
            ("training.dropout", number, ("hidden_dropout",)),
            ("launch.timeout_s", number, ("deepspeed_extra_args", "timeout")),
        )
    )
    path = facts.path("checkpoint_activations")
    if path and flag(dig(document.data, path)):
        facts.say("strategy.recompute", "full", path)
    _attention(facts)
    unknown = unknown_keys(document, keys("gpt_neox"), plain)
    return facts.reading("gpt_neox", unknown=unknown, fragment=not facts.has("num_layers"))


def _precision(value: Any) -> str | None:
    return {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32", "bf16": "bf16"}.get(str(value))


def _attention(facts: Facts) -> None:
    """``[[["flash"], 24]]``."""
    path = facts.path("attention_config")
    words = str(dig(facts.document.data, path)) if path else ""
    if "flash" in words:
        facts.say("strategy.attention", "flash", path)
    elif "global" in words:
        facts.say("strategy.attention", "eager", path)


FORMAT = Format("gpt_neox", "GPT-NeoX", recognizes, read, ("neox", "gpt-neox"), "EleutherAI/gpt-neox configs/neox_arguments.md")
