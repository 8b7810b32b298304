"""ZeRO stage 3, FSDP: parameters, gradients and optimizer states split; parameters gathered for each use (arXiv:1910.02054, section 5.3; arXiv:2304.11277)."""

from __future__ import annotations

from .placement import Sharding, Traffic

SHARDING = Sharding(
    "zero3",
    "ZeRO-3 / FSDP",
    {"optimizer": "dp_shard", "gradients": "dp_shard", "parameters": "dp_shard"},
    (
        Traffic("before_forward", "all_gather", "dp_shard", "parameters"),
        Traffic("before_backward", "all_gather", "dp_shard", "parameters"),
        Traffic("after_backward", "reduce_scatter", "dp_shard", "gradients"),
        Traffic("after_backward", "all_reduce", "dp_replicate", "gradients/dp_shard"),
    ),
    stage=3,
    aliases=("fsdp", "hsdp", "zero-3"),
    source="arXiv:1910.02054 section 5.3; arXiv:2304.11277",
)
