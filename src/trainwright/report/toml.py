"""A plan as a TOML run spec: what `trainwright plan -o` writes and every other command reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tomli_w

from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ..cost.estimate import Estimate


def plan_toml(estimate: Estimate) -> str:
    """The filled run spec, with what to expect as comments above it."""
    p = estimate.plan
    head = [
        f"{estimate.model.name}: {p.gpus} GPUs, dp {p.dp} x tp {p.tp} x pp {p.pp} x cp {p.cp}"
        + (f", ep {p.ep}" if p.ep > 1 else "")
        + f", micro-batch {p.micro_batch_size}, {p.accumulation} micro-batches a step",
        f"expected: {format_seconds(estimate.step_s)} a step, {estimate.tokens_per_s / p.gpus:,.0f} tokens/s per GPU, "
        f"MFU {estimate.mfu:.1%} (model FLOPs over the dense peak), "
        f"{format_bytes(estimate.device_bytes)} of {format_bytes(estimate.capacity_bytes)} on the fullest GPU",
        *estimate.reasons,
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in head) + "\n" + tomli_w.dumps(dict(estimate.spec))
