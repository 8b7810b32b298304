"""PyTorch FSDP2 (``fully_shard``) with DTensor tensor parallelism, as torchtitan uses them."""

from __future__ import annotations

from .base import Framework, MemoryRules

FRAMEWORK = Framework(
    name="fsdp2",
    title="PyTorch FSDP2 + DTensor (torchtitan)",
    aliases=("torchtitan", "fully_shard"),
    shardings=("none", "zero2", "zero3"),
    schedules=("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb1p", "zb-v", "dualpipe-v"),
    defaults={"sharding": "zero3", "gradient_dtype": "fp32", "master_weights": "fp32", "loss": "plain"},
    memory=MemoryRules(engine="tape", parameter_dtype="master"),
    offloads=("none", "optimizer-cpu", "params-cpu", "activations-cpu"),  # CPUOffloadPolicy moves the optimizer as well
    source="torch 2.13 torch/distributed/fsdp/_fully_shard; torchtitan",
)
