"""PyTorch FSDP2 (``fully_shard``) with DTensor tensor parallelism, as torchtitan uses them."""

from __future__ import annotations

from .base import Framework, MemoryRules, TimeRules

FRAMEWORK = Framework(
    name="fsdp2",
    title="PyTorch FSDP2 + DTensor (torchtitan)",
    aliases=("torchtitan", "fully_shard"),
    shardings=("none", "zero2", "zero3"),
    schedules=("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb1p", "zb-v", "dualpipe-v"),
    runs_lists=True,
    # Gradients are reduce-scattered after each micro-batch, as torchtitan and most loops do; put off (the default of an estimate), whole
    # unsharded gradients would be held from the second micro-batch on.
    search_options=(("no_sync", False),),
    defaults={"sharding": "zero3", "gradient_dtype": "fp32", "master_weights": "fp32", "loss": "plain"},
    memory=MemoryRules(
        engine="tape",
        parameter_dtype="master",
        autocasts=True,
        wraps_alone=False,
        reduces="own",
        compiled_loss_since="2025-01",
        reduces_each_where_offloaded=True,
    ),
    offloads=("none", "optimizer-cpu", "params-cpu", "activations-cpu"),  # CPUOffloadPolicy moves the optimizer as well
    time=TimeRules(
        dp_residual=0.146,
        fusion="eager",
        compiles=True,
        gather_copy_bytes=16.0,
        checkpoint_stops_early=True,
        selective="every-second-product",
        default_fp8_recipe="tensorwise",
        host_s_per_kernel=((0.0, 20e-6),),
        hides_tp=0.39,
        source="fully_shard copies parameters out of and gradients into its buffers; torchtitan's selective checkpoint saves every second product",
    ),
    source="torch 2.13 torch/distributed/fsdp/_fully_shard; torchtitan",
)
