"""Estimates as table rows, in the column order of NVIDIA's performance tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..units import GIB

if TYPE_CHECKING:
    from ..cost.estimate import Estimate


def plan_row(e: Estimate) -> dict[str, Any]:
    """GPUs, GBS, MBS, Seq, TP, PP, CP, VP, EP, tokens/s/GPU, TFLOP/s/GPU, then what else decides."""
    p, s = e.plan, e.plan.structure
    return {
        "GPUs": p.gpus,
        "GBS": e.job.global_batch_size,
        "MBS": p.micro_batch_size,
        "Seq": e.job.seq_len,
        "TP": p.tp,
        "PP": p.pp,
        "CP": p.cp,
        "VP": p.virtual_stages,
        "EP": p.ep,
        "Tokens/s/GPU": round(e.tokens_per_s / p.gpus, 1),
        "TFLOP/s/GPU": round(e.flops["model"] / e.step_s / p.gpus / 1e12, 1),
        "DP": p.dp if p.dp_replicate == 1 or p.dp_shard == 1 else f"{p.dp_replicate}x{p.dp_shard}",
        "Sharding": s.sharding,
        "Recompute": s.recompute,
        "Schedule": s.schedule if p.pp > 1 else "-",
        "Offload": s.offload,
        "Step s": round(e.step_s, 4),
        "MFU %": round(100 * e.mfu, 1),
        "GiB": round(e.device_bytes / GIB, 1),
        "USD": None if e.cost.usd is None else round(e.cost.usd),
    }
