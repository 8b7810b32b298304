"""Megatron-LM's arguments: on a command line (its forks too: Megatron-DeepSpeed, Megatron-LLM), as YAML of them, or as MODEL_ARGS of its test runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...emit import megatron as emitted
from ..document import Document, Path
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, launched, misspelt, model, number, plain, schedule, share, text, whole

OWN = (
    "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size", "num_attention_heads",
    "seq_length", "max_position_embeddings", "train_iters", "train_samples", "lr_decay_style", "min_lr", "clip_grad", "data_path", "tokenizer_type",
    "sequence_parallel", "use_distributed_optimizer", "recompute_granularity", "eval_iters", "split", "vocab_file", "ffn_hidden_size", "lr_warmup_fraction",
)  # fmt: skip
AXES = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size"), "pp": ("pipeline_model_parallel_size",), "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",), "etp": ("expert_tensor_parallel_size",),
}  # fmt: skip


def recognizes(document: Document) -> float:
    found = share(document, OWN)
    if launched(document, "program"):
        return 0.0 if found < 3 else min(0.95, 0.5 + found / 24)
    if document.syntax == "yaml" and isinstance(document.data, dict):
        inner = document.data.get("MODEL_ARGS")
        if isinstance(inner, dict) and len({plain(k) for k in inner} & set(OWN)) >= 2:
            return 1.0
        nested = document.data.get("language_model")
        if isinstance(nested, dict) and found >= 3:  # --yaml-cfg: the model's part stands in a table of its own
            return 0.9
        return (
            0.0
            if found < 6 or any("-" in str(k) for k in document.data) or "zero_optimization" in document.data
            else min(0.85, 0.4 + found / 24)
        )
    return 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    launch = document.syntax == "shell"
    facts = Facts(document, rank=2 if launch else 0)
    above = ("MODEL_ARGS",) if isinstance(document.data.get("MODEL_ARGS"), dict) else ()
    say(facts, *above)
    for table in ("language_model", "model_parallel"):
        if isinstance(document.data.get(table), dict):
            say(facts, table)
    known = keys("megatron").of()
    unknown: tuple[Path, ...] = tuple((k,) for k in document.data if launch and known and _dashed(k) not in known)
    if FORKS & {plain(k) for k in document.data}:
        unknown = misspelt(unknown, known, _dashed)
    return facts.reading("megatron", unknown=unknown, fragment=not launch and not above)


# Options of forks (Megatron-DeepSpeed, Megatron-LLM, releases before 2023), which have more that Megatron-LM does not list.
FORKS = {
    "deepspeed",
    "deepspeed_config",
    "zero_stage",
    "data_impl",
    "ddp_impl",
    "train_tokens",
    "use_checkpoint_args",
    "glu_activation",
    "no_tie_embed_logits",
}


def _dashed(key: Any) -> str:
    return plain(key).replace("_", "-")


def say(facts: Facts, *above: str) -> None:
    take = facts.take
    deepspeed = flag(facts.get(*above, "deepspeed")) or facts.has(*above, "deepspeed_config")
    if not above or above == ("MODEL_ARGS",):
        facts.say(FRAMEWORK, "megatron", facts.path(*above, "micro_batch_size") or (), rank=facts.rank + 1)
    for axis, names in AXES.items():
        take(f"strategy.{axis}", whole, *((*above, n) for n in names))
    model(facts, *above)
    facts.table(
        (
            ("strategy.micro_batch_size", whole, ((*above, "micro_batch_size"),)),
            ("training.global_batch_size", whole, ((*above, "global_batch_size"),)),
            ("training.seq_len", whole, ((*above, "seq_length"), (*above, "encoder_seq_length"))),
            ("training.steps", whole, ((*above, "train_iters"),)),
            ("training.samples", whole, ((*above, "train_samples"),)),
            ("training.learning_rate", number, ((*above, "lr"),)),
            ("training.warmup_steps", number, ((*above, "lr_warmup_iters"),)),
            ("training.decay_steps", whole, ((*above, "lr_decay_iters"),)),
            ("training.warmup_share", number, ((*above, "lr_warmup_fraction"),)),
            ("training.lr_schedule", schedule, ((*above, "lr_decay_style"),)),
            ("training.least_learning_rate", number, ((*above, "min_lr"),)),
            ("training.clip", number, ((*above, "clip_grad"),)),
            ("training.loss_scale", number, ((*above, "loss_scale"), (*above, "initial_loss_scale"))),
            ("training.dropout", number, ((*above, "hidden_dropout"),)),
            ("training.fp8_recipe", text, ((*above, "fp8_recipe"),)),
            ("training.optimizer", _optimizer, ((*above, "optimizer"),)),
            ("training.moe_capacity_factor", number, ((*above, "moe_expert_capacity_factor"),)),
            ("strategy.virtual_stages", whole, ((*above, "num_virtual_stages_per_pipeline_rank"),)),
            ("strategy.cp_kind", lambda v: {b: a for a, b in emitted.CP_KINDS.items()}.get(str(v)), ((*above, "cp_comm_type"),)),
            ("strategy.attention", lambda v: {b: a for a, b in emitted.ATTENTION.items()}.get(str(v)), ((*above, "attention_backend"),)),
        )
    )
    for name, field in (
        ("sequence_parallel", "strategy.sequence_parallel"),
        ("tp_comm_overlap", "strategy.async_tp"),
        ("fp8_param_gather", "strategy.fp8_params"),
    ):
        path = facts.path(*above, name)
        facts.say(field, flag(dig(facts.document.data, path)) if path else None, path)
    _types(facts, above)
    _memory(facts, above)
    _sharding(facts, above, bool(deepspeed))
    _virtual(facts, above)
    minutes = facts.path(*above, "distributed_timeout_minutes")
    value = number(dig(facts.document.data, minutes)) if minutes else None
    facts.say("launch.timeout_s", value * 60 if value is not None else None, minutes, value)


def _optimizer(value: Any) -> str | None:
    return {"adam": "adamw", "sgd": "sgd_momentum", "lion": "lion", "muon": "muon"}.get(str(value))


def _types(facts: Facts, above: tuple[str, ...]) -> None:
    for name in ("fp8_format", "bf16", "fp16"):
        path = facts.path(*above, name)
        value = dig(facts.document.data, path) if path else None
        if path and (flag(value) or (name == "fp8_format" and text(value) and flag(value) is not False)):
            facts.say("training.precision", "fp8" if name == "fp8_format" else name, path)
            return


def _memory(facts: Facts, above: tuple[str, ...]) -> None:
    granularity = facts.take("strategy.recompute", lambda v: v if v in ("full", "selective") else None, (*above, "recompute_granularity"))
    for old in ("checkpoint_activations", "recompute_activations", "deepspeed_activation_checkpointing"):
        path = facts.path(*above, old)
        if path and granularity is None and flag(dig(facts.document.data, path)):
            facts.say("strategy.recompute", "selective" if old == "recompute_activations" else "full", path)
            break
    if granularity == "full":
        facts.take("strategy.recompute_every", whole, (*above, "recompute_num_layers"))
    path = facts.path(*above, "optimizer_cpu_offload")
    if path and flag(dig(facts.document.data, path)):
        facts.say("strategy.offload", "optimizer-cpu", path)
    path = facts.path(*above, "use_flash_attn")
    if path and flag(dig(facts.document.data, path)):
        facts.say("strategy.attention", "flash", path)


def _sharding(facts: Facts, above: tuple[str, ...], deepspeed: bool) -> None:
    from .deepspeed import stage

    if deepspeed:
        facts.take("strategy.sharding", stage, (*above, "zero_stage"))
        return
    path = facts.path(*above, "use_distributed_optimizer")
    if path:
        facts.say("strategy.sharding", "zero1" if flag(dig(facts.document.data, path)) else "none", path)


def _virtual(facts: Facts, above: tuple[str, ...]) -> None:
    """Layers of a chunk -> chunks of a rank."""
    path = facts.path(*above, "num_layers_per_virtual_pipeline_stage")
    each = whole(dig(facts.document.data, path)) if path else None
    layers = next((whole(f.value) for f in facts.found if f.field == "model.num_hidden_layers"), None)
    pp = next((whole(f.value) for f in facts.found if f.field == "strategy.pp"), None)
    if each and layers and pp and layers % (each * pp) == 0:
        facts.say("strategy.virtual_stages", layers // (each * pp), path, each)


FORMAT = Format(
    "megatron", "Megatron-LM arguments", recognizes, read, ("megatron-lm", "megatron-core", "megatron-deepspeed"),
    "NVIDIA/Megatron-LM d98e8a64 megatron/training/arguments.py",
)  # fmt: skip
