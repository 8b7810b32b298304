"""The lesson's five functions, with its names, arguments and numbers. What each leaves out stands in `demonstrations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import SpecError, unknown

Array = np.ndarray[Any, Any]
SHARDING = ("none", "zero1", "zero2", "zero3", "fsdp")
OPTIMIZER_BYTES = {"adam": 8, "adamw": 8, "sgd": 4, "none": 0}
"""Bytes a parameter of optimizer states as the lesson counts them: two FP32 moments for Adam, one for SGD with momentum."""
CAPACITY_GB = 80


def _positive(value: float, where: str) -> None:
    if not isinstance(value, (int, float, np.integer, np.floating)) or not np.isfinite(value) or value <= 0:
        raise SpecError(f"{value!r} is not a number above zero", where)


def _count(value: int, where: str) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{value!r} is not a whole number of at least 1", where, "1")


def simulate_data_parallelism(data: Array, num_gpus: int, model_fn: Callable[[Array], tuple[float, Array]]) -> tuple[float, Array]:
    """(loss, gradient): `data` (rows, features) cut into `num_gpus` shards, `model_fn(shard)` -> (loss, gradient), both averaged over shards.

    The plain average of the shards' averages, as in the lesson: with unequal shards it is not the average over the rows; `trainwright.simulate.data_parallel`
    weighs by rows. Raises `SpecError` where a shard would be empty.
    """
    _count(num_gpus, "num_gpus")
    if len(data) < num_gpus:
        raise SpecError(f"{len(data)} rows are fewer than {num_gpus} GPUs", "num_gpus", [len(data)])
    results = [model_fn(shard) for shard in np.array_split(data, num_gpus)]
    return float(np.mean([loss for loss, _ in results])), np.mean([gradient for _, gradient in results], axis=0)


def simulate_tensor_parallelism(input_data: Array, weight_matrix: Array, num_gpus: int) -> tuple[Array, float]:
    """(output, largest error): `weight_matrix` (inner, columns) by columns over the GPUs, each multiplying `input_data` (rows, inner) by its own.

    Raises `SpecError` where the columns do not divide.
    """
    _count(num_gpus, "num_gpus")
    columns = weight_matrix.shape[1]
    if columns % num_gpus:
        near = sorted((d for d in range(1, columns + 1) if columns % d == 0), key=lambda d: (abs(d - num_gpus), d))
        raise SpecError(f"{columns} columns do not divide over {num_gpus} GPUs", "num_gpus", sorted(near[:3]))
    width = columns // num_gpus
    output = np.concatenate([input_data @ weight_matrix[:, g * width : (g + 1) * width] for g in range(num_gpus)], axis=-1)
    return output, float(np.max(np.abs(output - input_data @ weight_matrix)))


def simulate_pipeline_parallelism(
    num_layers: int, num_stages: int, num_microbatches: int
) -> tuple[dict[tuple[int, int, str], tuple[int, int]], int, float]:
    """(timeline, total time, bubble): all forwards, then all backwards in reverse order; a layer takes 1 either way.

    `timeline` maps (stage, microbatch, "fwd" | "bwd") to (start, end). The bubble is idle / total = (N - 1) / (M + N - 1).
    Layers that do not divide are left out, as in the lesson.
    """
    for value, where in ((num_layers, "num_layers"), (num_stages, "num_stages"), (num_microbatches, "num_microbatches")):
        _count(value, where)
    if num_layers < num_stages:
        raise SpecError(f"{num_layers} layers are fewer than {num_stages} stages", "num_stages", [num_layers])
    cost = num_layers // num_stages
    slots = num_microbatches + num_stages - 1
    timeline: dict[tuple[int, int, str], tuple[int, int]] = {}
    for stage in range(num_stages):
        for micro in range(num_microbatches):
            start = (stage + micro) * cost
            timeline[stage, micro, "fwd"] = (start, start + cost)
            back = (slots + (num_stages - 1 - stage) + (num_microbatches - 1 - micro)) * cost
            timeline[stage, micro, "bwd"] = (back, back + cost)
    return timeline, 2 * slots * cost, 1 - num_microbatches / slots


def memory_calculator(
    params_billions: float,
    precision_bytes: int = 2,
    optimizer: str = "adam",
    num_gpus: int = 1,
    sharding: str = "none",
    sequence_length: int = 2048,
    batch_size_per_gpu: int = 1,
    hidden_dim: int | None = None,
    num_layers: int | None = None,
) -> dict[str, Any]:
    """Memory of one GPU in GB (1e9), as the lesson counts it: weights, gradients, two FP32 moments, and a rule of thumb for activations.

    Activations: 4 x batch x sequence x hidden x layers x bytes where the shape is given, else half of the weights' bytes.
    No FP32 masters, no logits, no buffers: `trainwright.estimate` has them.
    """
    for value, where in (
        (params_billions, "params_billions"),
        (precision_bytes, "precision_bytes"),
        (sequence_length, "sequence_length"),
        (batch_size_per_gpu, "batch_size_per_gpu"),
    ):
        _positive(value, where)
    _count(num_gpus, "num_gpus")
    if sharding not in SHARDING:
        raise unknown("sharding", sharding, SHARDING, "sharding")
    if optimizer not in OPTIMIZER_BYTES:
        raise unknown("optimizer", optimizer, OPTIMIZER_BYTES, "optimizer")
    level = {"none": 0, "zero1": 1, "zero2": 2}.get(sharding, 3)
    weights = gradients = params_billions * precision_bytes
    states = params_billions * OPTIMIZER_BYTES[optimizer]
    if hidden_dim and num_layers:
        activations = 4 * batch_size_per_gpu * sequence_length * hidden_dim * num_layers * precision_bytes / 1e9
    else:
        activations = weights * 0.5
    weights /= num_gpus if level >= 3 else 1
    gradients /= num_gpus if level >= 2 else 1
    states /= num_gpus if level >= 1 else 1
    total = weights + gradients + states + activations
    return {
        "params_billions": params_billions,
        "weights_gb": weights,
        "optimizer_gb": states,
        "gradients_gb": gradients,
        "activations_gb": activations,
        "per_gpu_total_gb": total,
        "total_across_gpus_gb": total * num_gpus,
        "fits_on_80gb": total <= CAPACITY_GB,
        "num_gpus": num_gpus,
        "sharding": sharding,
    }


def mixed_precision_comparison(params_billions: float) -> dict[str, float]:
    """GB (1e9) of weights, Adam and gradients: FP32 throughout, FP16 with FP32 masters, and the lesson's BF16 without masters."""
    _positive(params_billions, "params_billions")
    fp32, mixed = params_billions * (4 + 8 + 4), params_billions * (2 + 8 + 2)
    return {
        "fp32_total_gb": fp32,
        "fp16_with_master_gb": params_billions * (2 + 4 + 8 + 2),
        "mixed_bf16_gb": mixed,
        "savings_vs_fp32": 1 - mixed / fp32,
    }
