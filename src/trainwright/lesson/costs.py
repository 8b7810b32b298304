"""What a training run costs, and two runs whose cost was published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..catalog.load import load_gpu
from ..errors import SpecError, unknown

PRICES = {"a100": 2.0, "h100": 3.5, "h800": 2.0}
"""Dollars per GPU-hour: the lesson's for A100 and H100; H800 as DeepSeek-V3's report assumes (arXiv:2412.19437, table 1)."""
UTILIZATION = {"data": 0.45, "fsdp": 0.45, "3d": 0.40, "moe": 0.35}
"""Share of the BF16 peak by strategy: the lesson's 35 to 45 %, less where more is exchanged. Llama 3 405B: 0.38 to 0.43 (arXiv:2407.21783, table 4)."""


def training_cost(
    parameters: float,
    tokens: float,
    gpu: str = "h100",
    gpus: int = 1,
    strategy: str = "3d",
    *,
    price: float | None = None,
    utilization: float | None = None,
) -> dict[str, float]:
    """FLOPs = 6 x parameters x tokens (active parameters of a mixture), hours at a utilization of the BF16 peak, dollars at a price per GPU-hour.

    `price` defaults to `PRICES`, `utilization` to the strategy's. Raises `SpecError` for an unknown GPU or strategy.
    """
    if gpu not in PRICES and price is None:
        raise unknown("GPU with a price", gpu, PRICES, "gpu")
    if strategy not in UTILIZATION:
        raise unknown("strategy", strategy, UTILIZATION, "strategy")
    for name, value in (("parameters", parameters), ("tokens", tokens), ("gpus", gpus)):
        if not value > 0 or math.isinf(value):
            raise SpecError(f"{value} is not a number above zero", name)
    share = UTILIZATION[strategy] if utilization is None else utilization
    if not 0 < share <= 1:
        raise SpecError(f"a utilization of {share} is not between 0 and 1", "utilization", "0.4")
    dollars = PRICES[gpu] if price is None else price
    flops = 6 * parameters * tokens
    hours = flops / (share * load_gpu(gpu).peak_flops["bf16"]) / 3600
    return {
        "flops": flops,
        "utilization": share,
        "gpu_hours": hours,
        "days": hours / gpus / 24,
        "price_usd_per_gpu_hour": dollars,
        "cost_usd": hours * dollars,
    }


@dataclass(frozen=True)
class Published:
    """A run whose GPU-hours were published."""

    name: str
    parameters: float
    tokens: float
    gpu: str
    gpus: int
    strategy: str
    gpu_hours: float
    lesson_usd: float
    source: str
    spec: Mapping[str, Any]


RUNS = (
    Published(
        "Llama 3 405B",
        405e9,
        15.6e12,
        "h100",
        16384,
        "3d",
        30.84e6,
        100e6,
        "tokens: arXiv:2407.21783; hours: Llama 3.1 model card",
        {
            "model": "llama-3.1-405b",
            "cluster": {"gpu": "h100", "nodes": 2048, "gpus_per_node": 8, "usd_per_gpu_hour": 3.5},
            "training": {"seq_len": 8192, "global_batch_size": 2048, "tokens": 15.6e12},
            "strategy": {
                "framework": "megatron",
                "tp": 8,
                "pp": 16,
                "dp": 128,
                "sharding": "zero1",
                "sequence_parallel": True,
                "schedule": "interleaved-1f1b",
                "virtual_stages": 4,
            },
        },
    ),
    Published(
        "DeepSeek-V3",
        37e9,
        14.8e12,
        "h800",
        2048,
        "moe",
        2.788e6,
        5.6e6,
        "arXiv:2412.19437, table 1 (pre-training 2.664M hours of it)",
        {
            "model": "deepseek-v3",
            "cluster": {"gpu": "h800", "nodes": 256, "gpus_per_node": 8, "usd_per_gpu_hour": 2.0},
            "training": {"seq_len": 4096, "global_batch_size": 15360, "tokens": 14.8e12, "precision": "fp8", "fp8_recipe": "blockwise"},
            "strategy": {"framework": "megatron", "tp": 1, "pp": 16, "ep": 64, "dp": 128, "sharding": "zero1", "schedule": "1f1b"},
        },
    ),
)
