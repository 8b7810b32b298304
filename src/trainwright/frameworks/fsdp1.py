"""PyTorch FSDP1 (``FullyShardedDataParallel``), as llm-foundry and many fine-tuning scripts use it."""

from __future__ import annotations

from .base import Framework, MemoryRules

FRAMEWORK = Framework(
    name="fsdp1",
    title="PyTorch FSDP1",
    aliases=("fsdp",),
    shardings=("none", "zero2", "zero3"),
    schedules=(),
    axes=("dp_replicate", "dp_shard", "tp"),
    defaults={"sharding": "zero3", "gradient_dtype": "fp32", "master_weights": "fp32", "loss": "plain"},
    offloads=("none", "optimizer-cpu", "params-cpu", "activations-cpu"),  # CPUOffload(offload_params=True) moves the optimizer as well
    memory=MemoryRules(
        parameter_dtype="master",
        source="torch/distributed/fsdp/_flat_param.py, _runtime_utils.py: a flat parameter each block, BACKWARD_PRE prefetch",
    ),
    source="torch/distributed/fsdp/fully_sharded_data_parallel.py",
)
