"""ZeRO stage 1: optimizer states split over the data-parallel ranks (Rajbhandari et al., arXiv:1910.02054, section 5.1)."""

from __future__ import annotations

from .placement import Sharding, Traffic

SHARDING = Sharding(
    "zero1",
    "ZeRO-1",
    {"optimizer": "dp_shard"},
    (
        Traffic("after_backward", "reduce_scatter", "dp_shard", "gradients"),
        Traffic("after_step", "all_gather", "dp_shard", "parameters"),
    ),
    stage=1,
    aliases=("zero-1",),
    source="arXiv:1910.02054 section 5.1",
)
