"""The lesson's tables, in bytes, computed from its rules."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]
MODELS = (("GPT-2 small", 124_000_000), ("Llama 3 8B", 8_000_000_000), ("Llama 3 70B", 70_000_000_000), ("Llama 3 405B", 405_000_000_000))
WEIGHT, GRADIENT, ADAM = 2, 2, 8
"""Bytes a parameter: FP16 weights and gradients, Adam's two FP32 moments."""


def states(parameters: int, weight: int = WEIGHT, gradient: int = GRADIENT) -> dict[str, int]:
    parts = {"weights_bytes": weight * parameters, "optimizer_bytes": ADAM * parameters, "gradients_bytes": gradient * parameters}
    return {**parts, "total_bytes": sum(parts.values())}


def _sharded(parameters: int, gpus: int) -> Rows:
    whole = states(parameters)
    names = {"weights": "weights_bytes", "optimizer": "optimizer_bytes", "gradients": "gradients_bytes", "total": "total_bytes"}
    return [{"component": n, "without_bytes": whole[key], "with_bytes": whole[key] // gpus} for n, key in names.items()]


def _zero_stages(parameters: int, gpus: int) -> Rows:
    """Per GPU on `gpus` of them; traffic in units of the 2 (n-1)/n of the weights' bytes that plain data parallelism moves."""
    whole = states(parameters)
    rows = []
    for stage, (name, shards) in enumerate(
        (
            ("none", ()),
            ("ZeRO-1", ("optimizer",)),
            ("ZeRO-2", ("optimizer", "gradients")),
            ("ZeRO-3 / FSDP", ("optimizer", "gradients", "weights")),
        )
    ):
        parts = {p: whole[f"{p}_bytes"] // (gpus if p in shards else 1) for p in ("weights", "optimizer", "gradients")}
        total = sum(parts.values())
        rows.append(
            {
                "stage": name,
                "shards": ", ".join(shards),
                "gpus": gpus,
                **{f"{k}_bytes": v for k, v in parts.items()},
                "total_bytes": total,
                "less_by": whole["total_bytes"] / total,
                "traffic": 1.5 if stage == 3 else 1.0,
            }
        )
    return rows


def tables() -> dict[str, Rows]:
    """{name: rows}: `model_memory`, `fsdp_70b`, `zero_stages`, `precision_7b`, `three_d`. Without activations and, as in the lesson, without FP32 masters."""
    seven = 7_000_000_000
    tp, pp, dp = 8, 16, 128
    return {
        "model_memory": [{"model": name, "parameters": n, **states(n)} for name, n in MODELS],
        "fsdp_70b": _sharded(70_000_000_000, 8),
        "zero_stages": _zero_stages(70_000_000_000, 8),
        "precision_7b": [{"precision": "fp32", **states(seven, 4, 4)}, {"precision": "mixed", **states(seven)}],
        "three_d": [{"tp": tp, "pp": pp, "dp": dp, "gpus": tp * pp * dp}],
    }
