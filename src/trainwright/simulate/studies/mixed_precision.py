"""Mixed precision: what underflows, what a loss scale saves, and what master weights are for."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from ...errors import SpecError
from ..fsdp import Optimizer
from ..model import TinyConfig, random_batch
from ..precision import Policy, Record, limits, train
from ..report import Report, Table
from . import Study
from .common import Seed, limited


def policies(tokens: int) -> dict[str, Policy]:
    """The runs that are compared; FP16 ones average the loss over `tokens`, as a large batch does."""
    return {
        "FP32": Policy("fp32"),
        "BF16, FP32 masters": Policy("bf16"),
        "BF16, no masters": Policy("bf16", master=False),
        "FP16, no loss scale": Policy("fp16", tokens=tokens),
        "FP16, static scale 2^16": Policy("fp16", scale=2.0**16, tokens=tokens),
        "FP16, dynamic scale": Policy("fp16", scale=0.0, first_scale=2.0**38, tokens=tokens),
        "FP16, no masters, dynamic": Policy("fp16", scale=0.0, first_scale=2.0**24, tokens=tokens, master=False),
        "FP8 products, BF16, masters": Policy("fp8"),
    }


def _row(name: str, r: Record) -> dict[str, Any]:
    return {
        "run": name,
        "first loss": float(np.mean(r.losses[:4])),
        "last loss": float(np.mean(r.losses[-4:])),
        "gradient values rounded to 0": r.underflow_share,
        "weights unmoved by a step": r.lost_updates,
        "steps skipped": len(r.skipped),
        "last scale": r.scales[-1],
    }


def mixed_precision(
    steps: Annotated[int, "Optimizer steps of each run."] = 1000,
    tokens: Annotated[int, "Tokens that the FP16 runs average the loss over (a large batch makes gradients small)."] = 2**20,
    rate: Annotated[float, "Adam's learning rate."] = 1e-3,
    seed: Seed = 0,
) -> Report:
    """One small transformer trained in FP32, BF16, FP16 and FP8 with real rounding: with and without master weights, loss scale none, static, dynamic."""
    limited(steps, 5000, "steps")
    limited(tokens, 2**30, "tokens")
    if not 0 < rate < 1:
        raise SpecError(f"a learning rate of {rate}", "rate", "0.001")
    config = TinyConfig(layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=16)
    batches = [random_batch(config, 4, 8, seed + i) for i in range(4)]
    formats = [
        {"format": form, **{k: f"{v:.5g}" for k, v in limits(form).items()}} for form in ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
    ]
    records = {name: train(config, p, batches, steps, seed=seed, optimizer=Optimizer(rate=rate)) for name, p in policies(tokens).items()}
    dynamic = records["FP16, dynamic scale"]
    masters, none = records["BF16, FP32 masters"], records["BF16, no masters"]
    scales = [0.0, *dynamic.scales]
    changes = [{"step": step, "scale": now} for step, (before, now) in enumerate(pairwise(scales), 1) if now != before]
    return Report(
        f"Mixed precision over {steps} steps",
        [
            Table("Formats", formats),
            Table("Runs from the same weights on the same tokens", [_row(n, r) for n, r in records.items()]),
            Table("The dynamic scale", changes),
        ],
        {"runs": {n: {**_row(n, r), "skipped_steps": r.skipped} for n, r in records.items()}},
        [
            f"Without FP32 masters {none.lost_updates:.0%} of the weights do not move in a step: smaller updates than half a last place are lost. "
            f"Loss {np.mean(none.losses[-4:]):.3f} against {np.mean(masters.losses[-4:]):.3f}.",
            f"Averaged over {tokens:,} tokens, {records['FP16, no loss scale'].underflow_share:.0%} of FP16's gradient values become 0; "
            f"with a scale of 2^16 {records['FP16, static scale 2^16'].underflow_share:.1%}. BF16 has FP32's exponents and needs no scale.",
            f"The dynamic scale starts at {dynamic.scales[0]:.3g}: {len(dynamic.skipped)} overflows were skipped, each halving it; 200 good steps double it.",
        ],
    )


STUDY = Study("mixed-precision", mixed_precision, "trainwright simulate mixed-precision --steps 300", ("precision", "amp"))
