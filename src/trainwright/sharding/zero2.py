"""ZeRO stage 2: optimizer states and gradients split (arXiv:1910.02054, section 5.2)."""

from __future__ import annotations

from .placement import Sharding, Traffic

SHARDING = Sharding(
    "zero2",
    "ZeRO-2",
    {"optimizer": "dp_shard", "gradients": "dp_shard"},
    (
        Traffic("after_backward", "reduce_scatter", "dp_shard", "gradients"),
        Traffic("after_step", "all_gather", "dp_shard", "parameters"),
    ),
    stage=2,
    aliases=("zero-2",),
    source="arXiv:1910.02054 section 5.2",
)
