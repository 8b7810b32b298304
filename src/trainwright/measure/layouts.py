"""Layouts of one job that a machine can run side by side: every strategy alone, with its usual companions, and with other micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DDP = {"framework": "ddp", "sharding": "none"}
ZERO3 = {"framework": "fsdp2", "sharding": "zero3"}


def layouts(gpus: int, batch: int) -> Iterator[dict[str, Any]]:
    """``[strategy]`` tables for `gpus` devices and `batch` sequences a step, the most different first. Some may not suit a model: who runs them, checks."""
    share = max(1, batch // gpus)
    small = max(1, share // 4)
    for strategy in (
        {**DDP, "micro_batch_size": share},
        {**ZERO3, "micro_batch_size": share},
        {"tp": gpus, "framework": "fsdp2", "sharding": "none", "sequence_parallel": True, "micro_batch_size": share, "no_dp": True},
        {"pp": gpus, "schedule": "1f1b", "micro_batch_size": small, "no_dp": True, **DDP},
        {**DDP, "micro_batch_size": share, "recompute": "full"},
        {**DDP, "micro_batch_size": small},
        {**ZERO3, "micro_batch_size": small, "recompute": "full"},
        {"framework": "ddp", "sharding": "zero1", "micro_batch_size": share},
        {"framework": "fsdp2", "sharding": "zero2", "micro_batch_size": share},
        {"pp": gpus, "schedule": "gpipe", "micro_batch_size": share, "no_dp": True, **DDP},
        {"pp": gpus, "schedule": "1f1b", "micro_batch_size": small, "recompute": "full", "no_dp": True, **DDP},
        {"tp": gpus, "framework": "fsdp2", "sharding": "none", "sequence_parallel": True, "micro_batch_size": small, "recompute": "full", "no_dp": True},
        {"pp": gpus, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch_size": small, "no_dp": True, **DDP},
        {"framework": "fsdp2", "sharding": "none", "micro_batch_size": share},
        {**ZERO3, "micro_batch_size": small},
        {"pp": gpus, "schedule": "1f1b", "micro_batch_size": max(1, batch // 2), "no_dp": True, **DDP},
        {"framework": "ddp", "sharding": "zero1", "micro_batch_size": small, "recompute": "full"},
        {"cp": gpus, "micro_batch_size": share, "no_dp": True, **ZERO3},
    ):
        table: dict[str, Any] = dict(strategy)
        table["dp"] = 1 if table.pop("no_dp", False) else gpus
        yield table


def name_of(strategy: Mapping[str, Any]) -> str:
    """A layout in a few words: what differs from one device."""
    words = [str(strategy.get("framework", "")), str(strategy.get("sharding", "none"))]
    words += [f"{axis} {strategy[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if (strategy.get(axis) or 1) > 1]
    words += ["sp"] if strategy.get("sequence_parallel") else []
    words += [str(strategy["schedule"])] if (strategy.get("pp") or 1) > 1 else []
    words += [f"micro-batch {strategy.get('micro_batch_size', 1)}"]
    if strategy.get("recompute", "none") != "none":
        words.append(f"recompute {strategy['recompute']}")
    return ", ".join(w for w in words if w and w != "none")
