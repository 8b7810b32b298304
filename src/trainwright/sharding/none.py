"""Plain data parallelism: everything whole on every rank, gradients all-reduced (Li et al., arXiv:2006.15704)."""

from __future__ import annotations

from .placement import Sharding, Traffic

SHARDING = Sharding(
    "none",
    "data parallel",
    {},
    (Traffic("after_backward", "all_reduce", "dp_replicate", "gradients"),),
    stage=0,
    aliases=("ddp", "zero0"),
    source="arXiv:2006.15704",
)
