"""What the lesson shows, in its order: its numbers beside the right ones, and a line wherever it errs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import simulate
from ..schedules.replay import schedule
from ..simulate.report import Report, Table
from ..units import GB
from .functions import (
    memory_calculator,
    mixed_precision_comparison,
    simulate_data_parallelism,
    simulate_pipeline_parallelism,
    simulate_tensor_parallelism,
)
from .tables import tables

MASTER_BYTES = 4
"""FP32 master weights, the part that the lesson's sums leave out: with them a parameter takes 16 bytes."""
STATE_BYTES = 2 + 2 + MASTER_BYTES + 8


def _error(report: Report) -> str:
    return f"{report.figures['relative_error']['gradients']:.0e}"


def opening() -> Report:
    """The problem: what a 7B model takes on an 80 GB card before it trains."""
    n, tokens, hidden, layers, heads = 7e9, 2048, 4096, 32, 32
    layer = tokens * hidden * 2 * 4
    whole = tokens * hidden * (34 + 5 * heads * tokens / hidden)
    flash = tokens * hidden * 34
    rows = [
        {"what": "weights, 16 bit", "lesson GB": 2 * n / GB, "right GB": 2 * n / GB},
        {"what": "Adam", "lesson GB": 4 * n / GB, "right GB": 8 * n / GB},
        {"what": "FP32 master weights", "lesson GB": 0.0, "right GB": MASTER_BYTES * n / GB},
        {"what": "gradients, 16 bit", "lesson GB": 2 * n / GB, "right GB": 2 * n / GB},
        {"what": "sum", "lesson GB": 8 * n / GB, "right GB": STATE_BYTES * n / GB},
        {"what": "activations of a sequence, all layers", "lesson GB": layer * layers / GB, "right GB": flash * layers / GB},
    ]
    return Report(
        "The problem: 7B parameters on one A100 of 80 GB",
        [Table("Memory of one card", rows)],
        {
            "states_bytes": int(STATE_BYTES * n),
            "activations_per_layer_bytes": {"lesson": layer, "flash": flash, "plain attention": int(whole)},
        },
        corrections=[
            f"Adam's two moments are FP32: 8 bytes a parameter, {8 * n / GB:.0f} GB and not 28 (the lesson itself counts {8 * n / GB:.0f} later); with masters "
            f"the states are {STATE_BYTES * n / GB:.0f} GB and do not fit at all.",
            f"A layer keeps more than 4 tensors: 34 bytes x tokens x hidden = {flash / 1e6:.0f} MB with flash attention and {whole / 1e6:.0f} MB with the "
            f"probabilities kept (sbh(34 + 5as/h), Korthikanti et al. 2022), not {layer / 1e6:.0f} MB.",
        ],
    )


def model_memory() -> Report:
    """Table 1, and what it means for 405B."""
    rows = [
        {
            "model": r["model"],
            "weights GB": r["weights_bytes"] / GB,
            "Adam GB": r["optimizer_bytes"] / GB,
            "gradients GB": r["gradients_bytes"] / GB,
            "lesson total GB": r["total_bytes"] / GB,
            "with masters GB": STATE_BYTES * r["parameters"] / GB,
        }
        for r in tables()["model_memory"]
    ]
    last = tables()["model_memory"][-1]
    cards, right = (-(-total // (80 * GB)) for total in (last["total_bytes"], STATE_BYTES * last["parameters"]))
    return Report(
        "Table 1: memory without activations",
        [Table("", rows)],
        {"h100s_for_405b": {"lesson": cards, "with masters": right}},
        [f"405B needs at least {cards} cards of 80 GB for these states alone."],
        [
            f"FP32 masters are left out: 16 bytes a parameter, not 12; 405B is {STATE_BYTES * 405:,} GB and {right} cards, before any activation or buffer."
        ],
    )


def data_parallelism() -> Report:
    """Demonstration 1: 64 x 32 data through a 32 x 16 weight on 1, 2, 4, 8 GPUs."""
    random = np.random.RandomState(42)
    data, weight = random.randn(64, 32), random.randn(32, 16)

    def model_fn(batch: Any) -> tuple[float, Any]:
        return float(np.mean((batch @ weight) ** 2)), 2 * batch.T @ (batch @ weight) / len(batch)

    def row(rows: int, gpus: int) -> dict[str, Any]:
        loss, gradient = simulate_data_parallelism(data[:rows], gpus, model_fn)
        right_loss, right = model_fn(data[:rows])
        return {
            "rows": rows,
            "GPUs": gpus,
            "loss": loss,
            "gradient norm": float(np.linalg.norm(gradient)),
            "right loss": right_loss,
            "right norm": float(np.linalg.norm(right)),
            "gradient error": float(np.abs(gradient - right).max() / np.abs(right).max()),
        }

    even, uneven = [row(64, n) for n in (1, 2, 4, 8)], [row(10, n) for n in (3, 5)]
    trained = simulate.data_parallel(ranks=3, batch=10, steps=2)
    wrong = uneven[0]
    return Report(
        "1. Data parallel: 64 x 32 data, a 32 x 16 weight, seed 42",
        [Table("Equal shards", even), Table("10 rows: unequal on 3 GPUs, equal on 5", uneven)],
        {"even": even, "uneven": uneven, "transformer_error": trained.figures["relative_error"]},
        [
            "Effective batch = per-GPU batch x N (64 x 16 = 1,024); a ring all-reduce sends 2 (N-1)/N of the gradient from every GPU.",
            f"A transformer on 3 ranks and 10 sequences, weighed by tokens: gradients {_error(trained)} from one device's.",
        ],
        [
            f"The mean of means of unequal shards is not the mean: 10 rows on 3 GPUs give loss {wrong['loss']:.4f}, right is {wrong['right loss']:.4f} "
            f"(gradient off by {wrong['gradient error']:.1%}); weigh shards by their rows."
        ],
    )


def tensor_parallelism(width: int = 8192) -> Report:
    """Demonstration 2: a 4 x 8192 input by an 8192 x 8192 weight, by columns on 1, 2, 4, 8 GPUs."""
    random = np.random.default_rng(42)
    x, weight = random.standard_normal((4, width)), random.standard_normal((width, width))
    rows = []
    for gpus in (1, 2, 4, 8):
        output, error = simulate_tensor_parallelism(x, weight, gpus)
        cut = width // gpus
        by_rows = sum(x[:, g * cut : (g + 1) * cut] @ weight[g * cut : (g + 1) * cut] for g in range(gpus))
        rows.append(
            {
                "GPUs": gpus,
                "piece by columns": f"{width} x {cut}",
                "output": "x".join(map(str, output.shape)),
                "largest error": error,
                "piece by rows": f"{cut} x {width}",
                "by rows: error": float(np.abs(by_rows - output).max()),
            }
        )
    exact = simulate.tensor_parallel(ranks=4, steps=2)
    return Report(
        f"2. Tensor parallel: 4 x {width} by {width} x {width}",
        [Table("By columns (concatenate) and by rows (add)", rows)],
        {"rows": rows, "transformer_error": exact.figures["relative_error"]},
        [
            "Columns first, then rows: nothing is exchanged between the two products, one all-reduce after them.",
            f"A whole transformer on 4 tensor-parallel ranks: gradients {_error(exact)} from one device's.",
        ],
        [
            "The lesson's function splits columns only; tensor parallelism also splits rows (the second matrix of each pair), whose partial sums are added.",
            "NVLink's 900 GB/s counts both directions (450 each way); InfiniBand's 50 GB/s is one direction: a factor of 9, not 18.",
        ],
    )


def pipeline_parallelism() -> Report:
    """Demonstration 3: 32 layers in 4 stages with 1 to 32 microbatches."""
    rows = []
    for m in (1, 4, 8, 16, 32):
        _, total, bubble = simulate_pipeline_parallelism(32, 4, m)
        fill, one = (schedule(name, stages=4, microbatches=m, forward=8, backward=8) for name in ("gpipe", "1f1b"))
        rows.append(
            {
                "microbatches": m,
                "lesson: time": total,
                "bubble": bubble,
                "GPipe: idle/total": fill.bubble_total,
                "idle/useful": fill.bubble_useful,
                "1F1B: time": one.makespan,
                "idle/total": one.bubble_total,
                "peak GPipe": max(fill.peak_per_rank),
                "peak 1F1B": max(one.peak_per_rank),
            }
        )
    return Report(
        "3. Pipeline: 32 layers in 4 stages, forward as long as backward",
        [Table("Peaks in activations of one microbatch", rows)],
        {"rows": rows},
        corrections=[
            "The bubble is (N-1)/(M+N-1) of the total time and (N-1)/M of the useful time: with 16 microbatches the code's 15.8 % and the text's 18.75 % "
            "are two measures of the same idle time.",
            "1F1B does not shrink the bubble: its time is GPipe's at any M; it keeps at most N microbatches instead of M.",
        ],
    )


def memory() -> Report:
    """Demonstration 4: who fits on 80 GB."""
    rows = []
    for billions, gpus, sharding in (
        (7, 1, "none"),
        (7, 8, "fsdp"),
        (70, 1, "none"),
        (70, 8, "fsdp"),
        (70, 16, "fsdp"),
        (405, 64, "fsdp"),
        (405, 128, "fsdp"),
    ):
        found = memory_calculator(billions, num_gpus=gpus, sharding=sharding)
        states = STATE_BYTES * billions / (gpus if sharding == "fsdp" else 1)
        rows.append(
            {
                "model": f"{billions}B",
                "GPUs": gpus,
                "sharding": sharding,
                "lesson: GB a GPU": found["per_gpu_total_gb"],
                "fits 80 GB": "yes" if found["fits_on_80gb"] else "no",
                "states with masters GB": states,
                "states fit": "yes" if states <= 80 else "no",
            }
        )
    return Report(
        "4. Memory by model and sharding",
        [
            Table("", rows),
            Table("Table 2: 70B on 8 GPUs with FSDP", _gigabytes("fsdp_70b")),
            Table("Table 3: ZeRO stages, 70B on 8 GPUs", _gigabytes("zero_stages")),
        ],
        {"rows": rows},
        ["Activations: the lesson takes half of the weights' bytes; `trainwright memory` counts them tensor by tensor."],
        [
            "States are 16 bytes a parameter with FP32 masters: 70B on 8 GPUs is 140 GB a GPU, not 105; 16 GPUs hold 70 GB and leave little for the rest.",
            "FSDP and ZeRO-3 move 1.5 times the traffic of data parallelism (an all-gather forward, one backward, a reduce-scatter), not the same.",
            _zero_limits(),
            "8 shards of 70B need more than states: the gathered block, its gradients, logits and buffers come on top.",
        ],
    )


def _zero_limits(gpus: int = 8) -> str:
    """Table 3's 4x and 8x are limits for many GPUs."""
    whole = STATE_BYTES
    one, two = 4 + 12 / gpus, 2 + 14 / gpus
    return (
        f"ZeRO-1's 4x and ZeRO-2's 8x are limits for many GPUs at 16 bytes a parameter; on {gpus} they are {whole / one:.1f}x and {whole / two:.1f}x, "
        "and in the lesson's own 12 bytes 2.4x and 3.7x."
    )


def _gigabytes(name: str) -> list[dict[str, Any]]:
    """A table of the lesson with its byte columns in GB."""
    return [
        {k.removesuffix("_bytes") + (" GB" if k.endswith("_bytes") else ""): v / GB if k.endswith("_bytes") else v for k, v in r.items()}
        for r in tables()[name]
    ]


def precision(steps: int = 300) -> Report:
    """Demonstration 5: FP32 against mixed precision; `steps` of training with real rounding."""
    rows = []
    for billions in (7, 13, 70, 405):
        found = mixed_precision_comparison(billions)
        rows.append(
            {
                "model": f"{billions}B",
                **{k: v for k, v in found.items() if k != "savings_vs_fp32"},
                "lesson saves": found["savings_vs_fp32"],
                "with masters saves": 1 - found["fp16_with_master_gb"] / found["fp32_total_gb"],
            }
        )
    short = simulate.mixed_precision(steps=steps)
    runs = [
        {k: r[k] for k in ("run", "first loss", "last loss", "gradient values rounded to 0", "weights unmoved by a step")}
        for r in short.figures["runs"].values()
    ]
    return Report(
        "5. FP32 against mixed precision (GB)",
        [
            Table("", rows),
            Table("Table 4: 7B", _gigabytes("precision_7b")),
            Table(f"A small transformer, {steps} steps with real rounding", runs),
        ],
        {"rows": rows, "runs": short.figures["runs"]},
        ["FP16 has 5 exponent and 10 mantissa bits and needs a loss scale; BF16 has 8 and 7 and needs none."],
        [
            "Without FP32 masters training suffers; with them 7B is 98 GB of weights, masters and Adam and 112 GB with gradients, not 84: "
            "as much as FP32 throughout. What it saves is activations and time.",
        ],
    )


def three_dimensions() -> Report:
    """Table 5: 405B on 16,384 GPUs, and the same shape small enough to execute."""
    small = simulate.combined(dp_shard=2, zero=1, tp=2, pp=2, cp=1, microbatches=4, steps=2)
    return Report(
        "Table 5: Llama 3 405B in three dimensions",
        [Table("", tables()["three_d"])],
        {"transformer_error": small.figures["relative_error"], "ranks": small.figures["ranks"]},
        [
            f"TP 2 x PP 2 x DP 2 executed on {small.figures['ranks']} virtual ranks: gradients {_error(small)} from one device's, bytes as the formulas say."
        ],
    )


DEMONSTRATIONS: dict[str, Callable[[], Report]] = {
    "problem": opening,
    "table 1": model_memory,
    "data parallel": data_parallelism,
    "tensor parallel": tensor_parallelism,
    "pipeline": pipeline_parallelism,
    "memory": memory,
    "precision": precision,
    "three dimensions": three_dimensions,
}
