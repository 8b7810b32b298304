"""torchtune: ``_component_`` everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import FRAMEWORK, Facts, dig, flag, launched, number, optimizer, plain, precision, schedule, text, unknown_keys, whole
from ._interpolate import resolved


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax not in ("yaml", "shell") or not isinstance(data, Mapping):
        return 0.0
    components = [v["_component_"] for v in data.values() if isinstance(v, Mapping) and isinstance(v.get("_component_"), str)]
    if launched(document, "program") and document.detail.name.rpartition("/")[2] == "tune":
        return 0.9
    return 0.96 if len(components) >= 2 or any(c.startswith("torchtune.") for c in components) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(resolved(document), rank=2 if document.syntax == "shell" else 0)
    facts.table(
        (
            ("strategy.micro_batch_size", whole, ("batch_size",)),
            ("training.accumulation", whole, ("gradient_accumulation_steps",)),
            ("training.steps", whole, ("max_steps_per_epoch",)),
            ("training.learning_rate", number, (("optimizer", "lr"),)),
            ("training.optimizer", optimizer, (("optimizer", "_component_"),)),
            ("training.warmup_steps", whole, (("lr_scheduler", "num_warmup_steps"),)),
            ("training.lr_schedule", schedule, (("lr_scheduler", "_component_"),)),
            ("training.clip", number, ("clip_grad_norm",)),
            ("training.precision", precision, ("dtype",)),
            ("training.seq_len", whole, (("tokenizer", "max_seq_len"),)),
            ("training.optimizer_in_backward", flag, ("optimizer_in_bwd",)),
            ("strategy.compile", flag, ("compile",)),
            ("strategy.tp", whole, ("tensor_parallel_dim",)),
            ("strategy.cp", whole, ("context_parallel_dim",)),
            ("strategy.dp_replicate", whole, ("data_parallel_replicate_dim",)),
            ("strategy.dp_shard", whole, ("data_parallel_shard_dim",)),
            ("training.lora_rank", whole, (("model", "lora_rank"),)),
            ("model.name", text, (("model", "_component_"),)),
            ("launch.gpus_per_node", whole, ("nproc_per_node",)),
            ("launch.nodes", whole, ("nnodes",)),
        )
    )
    path = facts.path("enable_activation_checkpointing")
    if path:
        facts.say("strategy.recompute", "full" if flag(dig(facts.document.data, path)) else "none", path)
    name = str(facts.get("model", "_component_") or "")
    if "lora" in name:
        facts.say("training.method", "qlora" if "qlora" in name else "lora", facts.path("model", "_component_"))
    if flag(facts.get("fsdp_cpu_offload")):
        facts.say("strategy.offload", "params-cpu", facts.path("fsdp_cpu_offload"))
    if facts.path("fsdp_cpu_offload") or "distributed" in facts.document.name:
        facts.say(FRAMEWORK, "fsdp2", facts.path("fsdp_cpu_offload") or facts.path("model"), rank=-1)
    return facts.reading("torchtune", unknown=unknown_keys(facts.document, keys("torchtune"), plain), fragment=document.syntax == "shell")


FORMAT = Format("torchtune", "torchtune", recognizes, read, ("tune",), "pytorch/torchtune recipes/configs")
