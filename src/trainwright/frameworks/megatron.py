"""Megatron-Core: contiguous gradient buffer, distributed optimizer (ZeRO-1), vocabulary-parallel loss."""

from __future__ import annotations

from .base import Framework

FRAMEWORK = Framework(
    name="megatron",
    title="Megatron-Core",
    aliases=("megatron-lm", "megatron-core", "nemo"),
    shardings=("none", "zero1"),
    schedules=("gpipe", "1f1b", "interleaved-1f1b"),
    defaults={
        "sharding": "zero1",
        "gradient_dtype": "fp32",
        "master_weights": "fp32",
        "loss": "vocab-parallel",
        "sequence_parallel": True,
    },
    pad_vocab_multiple=128,
    offloads=("none", "optimizer-cpu", "activations-cpu"),  # --optimizer-cpu-offload, --cpu-offloading
    replicates_kv_heads=True,  # num_query_groups must be a multiple or a divisor of tensor_model_parallel_size
    source="NVIDIA/Megatron-LM megatron/core/distributed, megatron/core/optimizer",
)
