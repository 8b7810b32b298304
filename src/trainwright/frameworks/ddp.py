"""PyTorch DistributedDataParallel, alone or with ZeroRedundancyOptimizer (ZeRO-1), around what DTensor, stages and contexts leave to each rank."""

from __future__ import annotations

from .base import Framework, MemoryRules, TimeRules

FRAMEWORK = Framework(
    name="ddp",
    title="PyTorch DDP",
    shardings=("none", "zero1"),
    schedules=("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb1p", "zb-v", "dualpipe-v"),
    runs_lists=True,
    defaults={"sharding": "none", "master_weights": "fp32", "loss": "plain"},
    memory=MemoryRules(engine="tape", autocasts=True, adapts_fp32=True, reduces="own"),
    ignores={
        "training.optimizer_in_backward": ("holds every gradient in its buckets", (), True),
        "strategy.async_tp": ("runs kernels one by one", (), False),
        "strategy.fp8_params": ("gathers no parameters", (), False),
        "strategy.reshard_root": ("gathers no parameters", (), False),
    },
    shards_over_cp=False,  # ZeroRedundancyOptimizer deals parameters over the data ranks
    offloads=("none", "optimizer-cpu", "activations-cpu"),  # torchao CPUOffloadOptimizer; torch.autograd.graph.save_on_cpu
    time=TimeRules(
        dp_residual=0.146,
        fusion="eager",
        compiles=True,
        checkpoint_stops_early=True,
        selective="every-second-product",
        default_fp8_recipe="tensorwise",
        host_s_per_kernel=((0.0, 20e-6),),
        source="torch DDP reduces 25 MB buckets behind backward; torch.utils.checkpoint non-reentrant stops early",
    ),
    source="torch/nn/parallel/distributed.py, torch/distributed/optim/zero_redundancy_optimizer.py, torch/distributed/tensor/parallel/ddp.py, "
    "torch/distributed/pipelining/stage.py",
)
