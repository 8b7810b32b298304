"""Megatron-Core: contiguous gradient buffer, distributed optimizer (ZeRO-1), vocabulary-parallel loss."""

from __future__ import annotations

from .base import Framework, MemoryRules, SaveRules

KERNELS = SaveRules(
    fused_norm=True,
    fused_gate=True,
    keeps_gathered_inputs=False,
    fp8_inputs=True,
    scores_fp32=False,
    probabilities_in_activation=True,
    source="arXiv:2205.05198 section 4; TransformerEngine layernorm_linear.py, Megatron-LM fused_bias_swiglu.py, fused_softmax.py",
)

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
    memory=MemoryRules(
        saves=KERNELS,
        selective="core_attn",
        fused_loss="kernel",
        accumulates_in_buffer=True,
        source="megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py",
    ),
    source="NVIDIA/Megatron-LM megatron/core/distributed, megatron/core/optimizer",
)
