"""Layouts of one job that a machine can run side by side: every strategy alone, with its usual companions, and with other micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DDP = {"framework": "ddp", "sharding": "none"}
PLAIN = {"framework": "fsdp2", "sharding": "none"}
ZERO3 = {"framework": "fsdp2", "sharding": "zero3"}


def layouts(gpus: int, batch: int) -> Iterator[dict[str, Any]]:
    """``[strategy]`` tables for `gpus` devices and `batch` sequences a step. Some may not suit a model: who runs them, checks."""
    share = max(1, batch // gpus)
    small, half = max(1, share // 4), max(1, batch // 2)
    data = {"dp": gpus}
    tensor = {**PLAIN, "dp": 1, "tp": gpus, "sequence_parallel": True}
    pipeline = {**PLAIN, "dp": 1, "pp": gpus}
    context = {"dp": 1, "cp": gpus}
    yield from (
        {**DDP, **data, "micro_batch_size": share},
        {**DDP, **data, "micro_batch_size": share, "recompute": "full"},
        {**DDP, **data, "micro_batch_size": small},
        {**ZERO3, **data, "micro_batch_size": share},
        {**ZERO3, **data, "micro_batch_size": small, "recompute": "full"},
        {**tensor, "micro_batch_size": batch},
        {**tensor, "micro_batch_size": half, "recompute": "full"},
        {**pipeline, "schedule": "1f1b", "micro_batch_size": small},
        {**pipeline, "schedule": "gpipe", "micro_batch_size": half},
        {**pipeline, "schedule": "gpipe", "micro_batch_size": half, "recompute": "full"},
        {**pipeline, "schedule": "1f1b", "micro_batch_size": batch},
        {**pipeline, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch_size": small},
        {"framework": "ddp", "sharding": "zero1", **data, "micro_batch_size": share},
        {"framework": "fsdp2", "sharding": "zero2", **data, "micro_batch_size": share, "recompute": "full"},
        {**pipeline, "schedule": "1f1b", "micro_batch_size": small, "recompute": "full"},
        {**PLAIN, **data, "micro_batch_size": share},
        {**PLAIN, **context, "micro_batch_size": batch},
        {**PLAIN, **context, "micro_batch_size": small, "cp_kind": "ulysses"},
        {**ZERO3, **context, "micro_batch_size": half, "recompute": "full"},
    )


def name_of(strategy: Mapping[str, Any]) -> str:
    """A layout in a few words: what differs from one device."""
    words = [str(strategy.get("framework", "")), str(strategy.get("sharding", "none"))]
    words += [f"{axis} {strategy[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if (strategy.get(axis) or 1) > 1]
    words += [str(strategy["cp_kind"])] if (strategy.get("cp") or 1) > 1 and strategy.get("cp_kind", "ring") != "ring" else []
    words += ["sp"] if strategy.get("sequence_parallel") else []
    words += [str(strategy["schedule"])] if (strategy.get("pp") or 1) > 1 else []
    words += [f"micro-batch {strategy.get('micro_batch_size', 1)}"]
    if strategy.get("recompute", "none") != "none":
        words.append(f"recompute {strategy['recompute']}")
    return ", ".join(w for w in words if w and w != "none")
