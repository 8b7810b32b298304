"""Accelerate: its YAML (FSDP, DeepSpeed, DDP) and ``accelerate launch`` with the same options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...emit import accelerate as emitted
from ..document import Document, Path
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, launched, number, plain, precision, share, text, unknown_keys, whole
from .deepspeed import stage

OWN = (
    "distributed_type", "num_processes", "num_machines", "machine_rank", "compute_environment", "main_training_function", "mixed_precision", "rdzv_backend",
    "same_network", "downcast_bf16", "fsdp_config", "deepspeed_config", "use_cpu", "main_process_ip", "tpu_use_cluster",
)  # fmt: skip
STRATEGIES = {
    "FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none", "HYBRID_SHARD": "zero3", "HYBRID_SHARD_ZERO2": "zero2",
    "1": "zero3", "2": "zero2", "3": "none", "4": "zero3", "5": "zero2", "TRUE": "zero3", "FALSE": "zero2",
}  # fmt: skip


def recognizes(document: Document) -> float:
    if launched(document, "accelerate"):
        return 1.0
    found = share(document, OWN)
    if document.syntax not in ("yaml", "json") or found < 2:
        return 0.0
    return min(1.0, 0.5 + found / 16 + 0.2 * ("distributed_type" in document.data))


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    launch = document.syntax == "shell"
    facts = Facts(document, rank=2 if launch else 0)
    _size(facts, launch)
    facts.take("training.precision", precision, "mixed_precision")
    kind = str(facts.get("distributed_type") or "").upper()
    fsdp = kind == "FSDP" or flag(facts.get("use_fsdp")) or (not kind and facts.has("fsdp_config"))
    deepspeed = kind == "DEEPSPEED" or flag(facts.get("use_deepspeed")) or (not kind and facts.has("deepspeed_config"))
    if fsdp:
        _fsdp(facts, () if launch else ("fsdp_config",))
    elif deepspeed:
        _deepspeed(facts, () if launch else ("deepspeed_config",))
    elif kind in ("MULTI_GPU", "NO") or flag(facts.get("multi_gpu")):
        facts.say(FRAMEWORK, "ddp", facts.path("distributed_type") or facts.path("multi_gpu"))
        facts.say("strategy.sharding", "none", facts.path("distributed_type") or facts.path("multi_gpu"))
    _degrees(facts, () if launch else ("parallelism_config",))
    backend = facts.get("dynamo_config", "dynamo_backend")
    if text(backend):
        facts.say("strategy.compile", str(backend).upper() != "NO", facts.path("dynamo_config", "dynamo_backend"))
    if launch:
        known = keys("accelerate").of("launch")
        unknown: tuple[Path, ...] = tuple((k,) for k in document.data if plain(k) not in known)
    else:
        unknown = unknown_keys(document, keys("accelerate"))
    return facts.reading("accelerate", unknown=unknown, fragment=launch)


def _size(facts: Facts, launch: bool) -> None:
    nodes = facts.take("launch.nodes", whole, "num_machines")
    processes = facts.take("launch.world_size", whole, "num_processes")
    path = facts.path("num_processes")
    if processes and (nodes or not launch) and processes % (nodes or 1) == 0:
        facts.say("launch.gpus_per_node", processes // (nodes or 1), path)
    facts.take("launch.main_address", text, "main_process_ip")
    facts.take("training.accumulation", whole, "gradient_accumulation_steps")
    facts.take("training.clip", number, "gradient_clipping")


def _fsdp(facts: Facts, above: tuple[str, ...]) -> None:
    second = number(facts.get(*above, "fsdp_version")) == 2
    facts.say(
        FRAMEWORK,
        "fsdp2" if second else "fsdp1",
        facts.path(*above, "fsdp_version") or facts.path("distributed_type") or facts.path(*above),
    )
    facts.take(
        "strategy.sharding",
        lambda v: STRATEGIES.get(str(v).upper()),
        (*above, "fsdp_reshard_after_forward"),
        (*above, "fsdp_sharding_strategy"),
    )
    offload = facts.path(*above, "fsdp_offload_params")
    if offload:
        facts.say("strategy.offload", {True: "params-cpu", False: "none"}.get(flag(dig(facts.document.data, offload))), offload)  # type: ignore[arg-type]
    recompute = facts.path(*above, "fsdp_activation_checkpointing")
    if recompute and flag(dig(facts.document.data, recompute)):
        facts.say("strategy.recompute", "full", recompute)


def _deepspeed(facts: Facts, above: tuple[str, ...]) -> None:
    facts.say(FRAMEWORK, "deepspeed", facts.path("distributed_type") or facts.path(*above) or facts.path("use_deepspeed"))
    facts.take("strategy.sharding", stage, (*above, "zero_stage"))
    if above:
        facts.take("training.accumulation", whole, (*above, "gradient_accumulation_steps"))
        facts.take("training.clip", number, (*above, "gradient_clipping"))
    for key, word in (("offload_param_device", "params"), ("offload_optimizer_device", "optimizer")):
        device = str(facts.get(*above, key) or "none").lower()
        live = word == "optimizer" or number(facts.get(*above, "zero_stage")) == 3
        if device in ("cpu", "nvme") and live:
            facts.say("strategy.offload", f"{word}-{device}", facts.path(*above, key))
            return


def _degrees(facts: Facts, above: tuple[str, ...]) -> None:
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        facts.take(f"strategy.{axis}", whole, (*above, f"{emitted.PREFIX}{axis}_size"))


FORMAT = Format(
    "accelerate",
    "Accelerate",
    recognizes,
    read,
    ("accelerate-launch",),
    "accelerate 1.15 commands/config/config_args.py, commands/launch.py",
)
