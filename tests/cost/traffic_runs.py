"""Short ways to a run: a specification as a dict, changed in a few words, resolved to what the equations take."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwright.cost.message import Message
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.resolve import Run, resolve
from trainwright.spec.run import validate

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
TINY_MOE = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LAYERS, HIDDEN, SEQ = 8, 1024, 2048


def run(model: str | dict[str, Any] = LLAMA, gpus: int = 8, cluster: dict[str, Any] | None = None, **fields: Any) -> Run:
    """`fields` are those of ``[training]`` and ``[strategy]``; one sequence a replica and micro-batch unless said otherwise."""
    training = {"seq_len": SEQ, "precision": "bf16"}
    strategy: dict[str, Any] = {"framework": "fsdp2"}
    names = {"global_batch_size", "precision", "seq_len", "gradient_dtype", "master_weights", "autocast", "loss", "method", "lora_rank"}
    names |= {"lora_targets", "moe_capacity_factor", "base_quantization", "optimizer"}
    accumulation = fields.pop("accumulation", 1)
    for name, value in fields.items():
        (training if name in names else strategy)[name] = value
    shape = [strategy.get(k, 1) for k in ("tp", "pp", "cp")]
    dp = gpus // int(np.prod(shape))
    training.setdefault("global_batch_size", dp * strategy.get("micro_batch_size", 1) * accumulation)
    nodes = {"gpu": "h100", "nodes": max(1, gpus // 8), "gpus_per_node": min(gpus, 8)}
    return resolve(validate({"model": model, "cluster": cluster or nodes, "training": training, "strategy": strategy}))


def messages(of: Run) -> list[Message]:
    return traffic(of.model, of.cluster, of.job, PlanTable.from_plans([of.plan]))


def sent(of: Run, axis: str | tuple[str, ...] = "", collective: str = "", phase: str = "", what: str = "") -> tuple[int, int]:
    """(calls, bytes) a step of the messages of that axis, collective, phase and with those words."""
    axes = (axis,) if isinstance(axis, str) else axis
    found = [
        m
        for m in messages(of)
        if (not axis or m.axis in axes) and m.collective.startswith(collective) and m.phase.startswith(phase) and what in m.what
    ]
    return sum(int(m.calls[0]) for m in found), sum(int((m.calls * m.bytes_per_call)[0]) for m in found)


def ring_bytes(of: Run, axes: tuple[str, ...] = ("dp", "dp_shard", "dp_replicate")) -> float:
    """Bytes that a rank puts on the wire of a ring: 2 (n-1)/n S for an all-reduce, (n-1)/n S for its halves, S to pass a broadcast on."""
    total = 0.0
    for m in messages(of):
        if m.axis in axes:
            n = int(m.ranks[0])
            factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}.get(m.collective, 1.0)
            total += factor * float((m.calls * m.bytes_per_call)[0])
    return total
