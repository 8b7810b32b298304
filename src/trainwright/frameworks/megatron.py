"""Megatron-Core: contiguous gradient buffer, distributed optimizer (ZeRO-1), vocabulary-parallel loss."""

from __future__ import annotations

from .base import Framework, MemoryRules, SaveRules, TimeRules

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
    ignores={
        "training.autocast": ("casts the weights itself", (), False),
        "training.optimizer_kernel": ("steps with fused kernels", (), False),
        "training.optimizer_in_backward": ("steps after backward", (), False),
        "training.loss": ("splits the loss over the vocabulary", ("plain", "chunked"), False),
        "strategy.compile": ("fuses by kernels of its own", (), False),
        "strategy.reshard_root": ("gathers no parameters", (), False),
    },
    pad_vocab_multiple=128,
    offloads=("none", "optimizer-cpu", "activations-cpu"),  # --optimizer-cpu-offload, --cpu-offloading
    replicates_kv_heads=True,  # num_query_groups must be a multiple or a divisor of tensor_model_parallel_size
    saves_copies=True,  # the model's state and the distributed optimizer's fp32 parameters
    memory=MemoryRules(
        saves=KERNELS,
        selective="core_attn",
        fused_loss="kernel",
        accumulates_in_buffer=True,
        reduces="fp32",  # grad_reduce_in_fp32, else param.dtype
        source="megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py",
    ),
    even_stages=True,
    time=TimeRules(
        dp_residual=0.146,
        fusion="fused",
        fuses_projections=True,
        fuses_gradient_sum=True,
        selective="core_attn",
        default_fp8_recipe="delayed",
        host_s_per_kernel=((0.0, 25e-6), (2024.0, 30e-6)),
        host_s_per_expert=36.5e-6,
        host_s_per_dispatch=1.65e-3,
        hides_tp=0.861,
        hides_ep=0.33,
        hides_ep_since=2025.5,
        overlaps_dp_since=2023.0,
        blocking_p2p=True,
        scatters_p2p=True,
        attention="te",
        hides_input_gradient_since=2021.9,
        source="Megatron-Core: fused kernels, tp_comm_overlap by user buffers, overlap_grad_reduce and overlap_param_gather since 2023; reentrant checkpoint",
    ),
    source="NVIDIA/Megatron-LM megatron/core/distributed, megatron/core/optimizer",
)
