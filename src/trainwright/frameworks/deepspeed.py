"""DeepSpeed: ZeRO 1 to 3 with buckets, offload, its pipeline engine; also Megatron-DeepSpeed."""

from __future__ import annotations

from .base import Framework, MemoryRules, SaveRules, TimeRules

MEGATRON_KERNELS = SaveRules(
    fused_norm=True,
    fused_gate=True,
    keeps_gathered_inputs=False,
    scores_fp32=False,
    source="Megatron-DeepSpeed megatron/model: fused layer norm, scaled masked softmax, bias GELU",
)

FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    shardings=("none", "zero1", "zero2", "zero3"),
    schedules=("1f1b",),
    defaults={"sharding": "zero3", "gradient_dtype": "bf16", "master_weights": "fp32", "loss": "plain"},
    ignores={
        "training.autocast": ("casts the weights itself", (), False),
        "training.optimizer_in_backward": ("steps after backward", (), False),
        "strategy.async_tp": ("runs kernels one by one", (), False),
        "strategy.fp8_params": ("keeps 16-bit weights", (), False),
        "strategy.reshard_root": ("has no root group", (), False),
    },
    offload_stages={"optimizer-cpu": 1, "params-cpu": 3, "optimizer-nvme": 3, "params-nvme": 3},
    offloads=("none", "optimizer-cpu", "params-cpu", "optimizer-nvme", "params-nvme", "activations-cpu"),  # ZeRO-Offload, ZeRO-Infinity
    pipeline_zero_stage=1,  # PipelineEngine: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
    saves_copies=True,  # mp_rank_*_model_states.pt and *_optim_states.pt with fp32 partitions
    mixes_whole_gradients=False,  # runtime/engine.py: "unsupported mix of model_dtype and grad_accum_dtype" without ZeRO
    memory=MemoryRules(
        saves_parallel=MEGATRON_KERNELS,
        selective="core_attn",
        holds_outputs="live",
        source="deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py, runtime/bf16_optimizer.py",
    ),
    even_stages=True,
    time=TimeRules(
        dp_residual=0.146,
        fusion="fused",
        eager_when_sharded=True,
        fuses_projections=True,
        selective="core_attn",
        host_s_per_kernel=((0.0, 88e-6), (2023.5, 28e-6)),
        # a fetch and its release: 0.43 to 0.55 ms a weight and pass on a slow shared core (DeepSpeed 0.19.8, torch 2.13, 24 layers of eight weights, beside
        # ZeRO-1; 2026-11-30); a server's core is taken to need two thirds of it, which nobody measured
        host_s_per_gather=3e-4,
        micro_batch_s=0.002,
        overlaps_dp_since=2022.0,
        configures_overlap_since=2023.5,
        gather_slowdown=((0.0, 6.0), (2022.0, 1.0)),  # parameter by parameter, in lists of tensors, before the coordinator of v0.6
        blocking_p2p=True,
        hides_input_gradient_since=2023.0,
        scatters_p2p=True,
        source="Megatron-DeepSpeed: Megatron's fused kernels, reentrant checkpoint; the pipeline engine reduces gradients after the last backward",
    ),
    source="deepspeed/runtime/zero, deepspeed/runtime/pipe",
)
