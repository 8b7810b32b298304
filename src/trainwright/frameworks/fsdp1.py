"""PyTorch FSDP1 (``FullyShardedDataParallel``), as llm-foundry and many fine-tuning scripts use it."""

from __future__ import annotations

from .base import Framework, MemoryRules, TimeRules

FRAMEWORK = Framework(
    name="fsdp1",
    title="PyTorch FSDP1",
    aliases=("fsdp",),
    shardings=("none", "zero2", "zero3"),
    schedules=(),
    axes=("dp_replicate", "dp_shard", "tp"),
    ignores={
        "strategy.async_tp": ("runs kernels one by one", (), False),
        "strategy.reshard_root": ("keeps its root gathered", (), False),
    },
    search_options=(("no_sync", False),),  # shards are kept instead of whole gradients: a loop that leaves out `no_sync()`
    defaults={"sharding": "zero3", "gradient_dtype": "fp32", "master_weights": "fp32", "loss": "plain"},
    offloads=("none", "optimizer-cpu", "params-cpu", "activations-cpu"),  # CPUOffload(offload_params=True) moves the optimizer as well
    memory=MemoryRules(
        parameter_dtype="master",
        autocasts=True,
        reduces="own",
        holds_outputs="cached",
        reduces_each_families=("gpt2", "mpt"),  # Composer's ddp_sync_context does nothing around FSDP
        kernel_loss_families=("gpt2", "mpt"),  # llm-foundry's MPT: loss_fn fused_crossentropy (flash-attention's kernel) is its default
        source="torch/distributed/fsdp/_flat_param.py, _runtime_utils.py: a flat parameter each block, BACKWARD_PRE prefetch",
    ),
    time=TimeRules(
        dp_residual=0.146,
        fusion="eager",
        compiles=True,
        fuses_projections=True,
        checkpoint_stops_early=True,
        selective="every-second-product",
        default_fp8_recipe="delayed",
        host_s_per_kernel=((0.0, 20e-6),),
        source="FSDP1 gathers flat parameters as views and prefetches the next unit; torch.utils.checkpoint non-reentrant stops early",
    ),
    source="torch/distributed/fsdp/fully_sharded_data_parallel.py",
)
