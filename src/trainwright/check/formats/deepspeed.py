"""DeepSpeed's JSON (also inside a script or another file): ``zero_optimization`` and the batch keys; ``auto`` filled as Hugging Face's Trainer fills it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...emit import deepspeed as emitted
from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, is_open, number, optimizer, schedule, share, text, unknown_keys, whole

OWN = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print",
    "wall_clock_breakdown", "fp16", "bf16", "optimizer", "scheduler", "zero_allow_untested_optimizer", "activation_checkpointing", "amp", "bfloat16",
    "prescale_gradients", "tensor_parallel", "zero_force_ds_cpu_optimizer",
)  # fmt: skip
# Keys of DeepSpeed that the Trainer fills under "auto": field of a fact of the Trainer's own arguments.
FILLED = {
    ("train_micro_batch_size_per_gpu",): "strategy.micro_batch_size",
    ("gradient_accumulation_steps",): "training.accumulation",
    ("train_batch_size",): "training.global_batch_size",
    ("gradient_clipping",): "training.clip",
    ("optimizer", "params", "lr"): "training.learning_rate",
    ("scheduler", "params", "warmup_max_lr"): "training.learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "training.warmup_steps",
    ("scheduler", "params", "total_num_steps"): "training.steps",
}


def recognizes(document: Document) -> float:
    if document.syntax not in ("json", "yaml") or not isinstance(document.data, dict):
        return 0.0
    data = document.data
    if "log_history" in data or "best_metric" in data or "per_device_train_batch_size" in data or "model_type" in data:
        return 0.0
    found = share(document, OWN)
    zero = data.get("zero_optimization")
    if isinstance(zero, dict) and {"stage", "offload_optimizer", "overlap_comm", "cpu_offload"} & zero.keys():
        found += 2
    if "train_micro_batch_size_per_gpu" in data or "train_batch_size" in data:
        found += 1
    neox = any(isinstance(k, str) and ("-" in k or k in ("num_layers", "hidden_size")) for k in data)
    return 0.0 if neox or found < 2 else min(0.95, 0.5 + found / 20)


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    say(facts)
    _automatic(facts, context.get("values", {}))
    fragment = not any(facts.has(k) for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"))
    return facts.reading("deepspeed", unknown=unknown_keys(document, keys("deepspeed")), fragment=fragment)


def say(facts: Facts, *above: str) -> None:
    """The facts of a DeepSpeed table that stands at `above`."""
    facts.say(FRAMEWORK, "deepspeed", facts.path(*above, "zero_optimization") or facts.path(*above))
    facts.table(
        (
            ("training.global_batch_size", whole, ((*above, "train_batch_size"),)),
            ("strategy.micro_batch_size", whole, ((*above, "train_micro_batch_size_per_gpu"),)),
            ("training.accumulation", whole, ((*above, "gradient_accumulation_steps"),)),
            ("training.clip", number, ((*above, "gradient_clipping"),)),
            ("training.learning_rate", number, ((*above, "optimizer", "params", "lr"),)),
            ("training.optimizer", optimizer, ((*above, "optimizer", "type"),)),
            ("training.warmup_steps", number, ((*above, "scheduler", "params", "warmup_num_steps"),)),
            ("training.lr_schedule", schedule, ((*above, "scheduler", "type"),)),
            ("training.decay_steps", number, ((*above, "scheduler", "params", "total_num_steps"),)),
            ("training.loss_scale", number, ((*above, "fp16", "loss_scale"),)),
            ("training.gradient_dtype", text, ((*above, "data_types", "grad_accum_dtype"),)),
            ("strategy.tp", whole, ((*above, "tensor_parallel", "autotp_size"),)),
            ("strategy.cp", whole, ((*above, "sequence_parallel_size"),)),
            ("strategy.sharding", stage, ((*above, "zero_optimization", "stage"),)),
        )
    )
    pipeline = facts.path(*above, "pipeline", "stages")
    if pipeline:
        facts.say("strategy.pp", whole(dig(facts.document.data, pipeline)), pipeline)
    for name in ("bf16", "bfloat16", "fp16"):
        path = facts.path(*above, name, "enabled")
        if path and flag(dig(facts.document.data, path)):
            facts.say("training.precision", "fp16" if name == "fp16" else "bf16", path)
    zero = facts.get(*above, "zero_optimization")
    if isinstance(zero, Mapping):
        _zero(facts, zero, above)


def stage(value: Any) -> str | None:
    found = number(value)
    return {v: k for k, v in emitted.STAGES.items()}.get(int(found)) if found is not None and found == int(found) else None


def _zero(facts: Facts, zero: Mapping[str, Any], above: tuple[str, ...]) -> None:
    for key, word in (("offload_param", "params"), ("offload_optimizer", "optimizer")):
        device = facts.get(*above, "zero_optimization", key, "device")
        live = word == "optimizer" or number(zero.get("stage")) == 3  # below stage 3 parameters stay
        if device in ("cpu", "nvme") and live:
            facts.say("strategy.offload", f"{word}-{device}", facts.path(*above, "zero_optimization", key, "device"))
            break
    else:
        old = facts.path(*above, "zero_optimization", "cpu_offload")
        if old and flag(dig(facts.document.data, old)):
            facts.say("strategy.offload", "optimizer-cpu", old)
    options = {k: v for k, v in zero.items() if k in emitted.ZERO_KEYS and v != "auto" and not isinstance(v, (dict, list))}
    clean = {k: number(v) if isinstance(v, str) and number(v) is not None else v for k, v in options.items()}
    if clean:
        facts.say("strategy.options", clean, facts.path(*above, "zero_optimization"))


def _automatic(facts: Facts, values: Mapping[str, Any]) -> None:
    """ "auto" as transformers.integrations.deepspeed fills it: from the Trainer's arguments and the model's width."""
    for path, field in FILLED.items():
        if facts.get(*path) == "auto" and field in values:
            facts.say(field, values[field], path, "auto", rank=-1)
    for name in ("bf16", "fp16"):
        if facts.get(name, "enabled") == "auto" and values.get("training.precision") == name:
            facts.say("training.precision", name, (name, "enabled"), "auto", rank=-1)
    hidden = values.get("model.hidden_size")
    zero = facts.get("zero_optimization")
    if not isinstance(hidden, int) or not isinstance(zero, Mapping):
        return
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    filled = {k: v for k, v in sizes.items() if zero.get(k) == "auto"}
    if filled:
        facts.say("strategy.options", filled, ("zero_optimization",), "auto", rank=-1)


FORMAT = Format(
    "deepspeed", "DeepSpeed JSON", recognizes, read, ("ds", "zero"),
    "deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py; transformers 5.24 integrations/deepspeed.py (auto)",
)  # fmt: skip
__all__ = ["FORMAT", "is_open", "say"]
