"""The lesson's five exercises, solved: formulas, and what the virtual ranks measure.

With a `planner` (the library's `estimate`) its numbers stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import simulate
from ..catalog.load import load_gpu
from ..errors import SpecError, TrainwrightError
from ..schedules.replay import schedule
from ..simulate.report import Report, Table
from ..units import GB
from .costs import RUNS, training_cost

Planner = Callable[[Mapping[str, Any]], Any]
"""A run spec -> an estimate with `to_dict()`."""


# --- 1: checkpointing --------------------------------------------------------------------------------------------------------------------------


def checkpointed_activations(layers: int, hidden: int, tokens: int, every: int = 0) -> dict[str, float]:
    """Bytes of activations in 16 bit with flash attention, and extra computation, keeping the input of every `every`-th layer (0: no checkpointing).

    A layer's saved tensors are 34 x tokens x hidden bytes and its input 2 x tokens x hidden (Korthikanti et al. 2022, equation 2 without the attention core);
    backward holds the kept inputs and one group of `every` layers. Extra: one more forward = 1/3 of forward + backward.
    """
    if every < 0 or every > layers:
        raise SpecError(f"every {every}th of {layers} layers", "every", [1, layers])
    if every == 0:
        return {"bytes": 34.0 * tokens * hidden * layers, "extra_compute": 0.0}
    kept = math.ceil(layers / every)
    return {"bytes": (2.0 * kept + 34.0 * every) * tokens * hidden, "extra_compute": 1 / 3}


def checkpointing() -> Report:
    """Exercise 1: keep every K-th layer; memory saved against about 33 % more computation."""
    layers, hidden, tokens = 32, 4096, 2048
    none = checkpointed_activations(layers, hidden, tokens)["bytes"]
    rows: list[dict[str, Any]] = []
    for every in (0, 1, 2, 3, 4, 8, 16, 32):
        found = checkpointed_activations(layers, hidden, tokens, every)
        rows.append(
            {
                "keep": f"every {every}" if every else "all",
                "activations GB a sequence": found["bytes"] / GB,
                "saved": 1 - found["bytes"] / none,
                "extra compute": found["extra_compute"],
            }
        )
    best = min((r for r in rows if r["keep"] != "all"), key=lambda r: float(r["activations GB a sequence"]))
    measured = simulate.recompute(layers=8, every=3)
    return Report(
        "Exercise 1: checkpointing in the calculator, 7B, 2,048 tokens",
        [Table("Formula", rows), *measured.tables],
        {"rows": rows, "best": best["keep"], "measured": measured.figures["rows"]},
        [
            f"Best: {best['keep']} (34 K + 2 L/K is smallest at K = sqrt(2 L / 34)); {best['saved']:.0%} less memory for a third more computation.",
            f"Executed on numbers: gradients differ by {measured.figures['largest_difference']:.0e}, and full recomputation runs every block's forward twice.",
        ],
        [
            "At flash attention's small footprint K = 1 is already near the best; K = sqrt(L) is the rule where a layer's tensors weigh as much as its input."
        ],
    )


# --- 2: 1F1B -----------------------------------------------------------------------------------------------------------------------------------


def one_forward_one_backward(stages: int = 4, microbatches: int = 8) -> Report:
    """Exercise 2: 1F1B against the naive schedules: bubble and peak memory."""
    rows = []
    for name, label, m in (
        ("gpipe", "naive: the batch in one piece", 1),
        ("gpipe", "naive: all forwards, all backwards", microbatches),
        ("1f1b", "1F1B", microbatches),
    ):
        found = schedule(name, stages=stages, microbatches=m, forward=1, backward=1)
        rows.append(
            {
                "schedule": label,
                "microbatches": m,
                "time (microbatch forwards)": found.makespan * microbatches / m,
                "bubble idle/total": found.bubble_total,
                "idle/useful": found.bubble_useful,
                "peak (microbatches)": max(found.peak_per_rank) * microbatches / m,
                "by rank": " ".join(f"{p * microbatches / m:g}" for p in found.peak_per_rank),
            }
        )
    runs = {
        name: simulate.pipeline(schedule=name, ranks=stages, microbatches=microbatches, batch=microbatches, steps=2)
        for name in ("gpipe", "1f1b")
    }
    measured = [
        {
            "schedule": name,
            "activations kept at most (bytes)": max(row["activations kept at most (bytes)"] for row in r.tables[0].rows),
            "gradient error": r.figures["relative_error"]["gradients"],
        }
        for name, r in runs.items()
    ]
    return Report(
        f"Exercise 2: 1F1B for {stages} stages and {microbatches} microbatches",
        [Table("Replayed, forward as long as backward", rows), Table("Executed on a small transformer", measured)],
        {"rows": rows, "measured": measured},
        [f"1F1B keeps {stages} microbatches at most, GPipe {microbatches}: memory {microbatches / stages:g} times less."],
        [
            f"The bubble is the same: (N-1)/(M+N-1) = {(stages - 1) / (microbatches + stages - 1):.1%} of the time for both; 1F1B saves memory."
        ],
    )


# --- 3: accumulation ---------------------------------------------------------------------------------------------------------------------------


def gradient_accumulation(steps: int = 4) -> Report:
    """Exercise 3: K steps, one exchange: K times less traffic, the same gradients."""
    found = simulate.accumulation(ranks=2, microbatches=steps, batch=4 * steps, steps=2)
    return Report(
        f"Exercise 3: accumulation over {steps} steps",
        found.tables,
        {k: found.figures[k] for k in ("traffic_ratio", "relative_error", "gradient_error_mean_of_means")},
        found.notes,
        [
            "With sequences of unequal token counts the mean of the microbatches' means is another gradient "
            f"(off by {found.figures['gradient_error_mean_of_means']:.1%} here): divide by all tokens of the step."
        ],
    )


# --- 4: cost -----------------------------------------------------------------------------------------------------------------------------------


def planned(planner: Planner | None, spec: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """(the planner's answer, why there is none)."""
    if planner is None:
        return None, ""
    try:
        return planner(spec).to_dict(), ""
    except TrainwrightError as error:
        return None, f"The planner: {error}"


def _where_time_goes(name: str, answer: Mapping[str, Any]) -> str:
    """The planner's step in words: its framework's way of running the layout, which need not be the run's own engine."""
    parts = answer["time"]["breakdown"]
    largest = sorted((k for k in parts if k != "compute"), key=lambda k: -parts[k])[:3]
    shares = ", ".join(f"{k} {parts[k] / answer['time']['step_s']:.0%}" for k in largest)
    spec = answer["spec"]["strategy"]
    return f"The planner's {name}: {spec['framework']} with {spec['schedule']}, {answer['throughput']['mfu']:.0%} MFU; the rest goes to {shares}."


def cost(planner: Planner | None = None) -> Report:
    """Exercise 4: what a run costs, checked on Llama 3 405B and DeepSeek-V3."""
    rows, reasons = [], []
    for run in RUNS:
        low, middle, high = (
            training_cost(run.parameters, run.tokens, run.gpu, run.gpus, run.strategy, utilization=u) for u in (0.45, None, 0.35)
        )
        peak = load_gpu(run.gpu).peak_flops["bf16"]
        answer, reason = planned(planner, run.spec)
        reasons += [reason] if reason else [_where_time_goes(run.name, answer)] if answer else []
        rows.append(
            {
                "run": run.name,
                "FLOPs, 1e24": middle["flops"] / 1e24,
                "hours, M": middle["gpu_hours"] / 1e6,
                "days": middle["days"],
                "$M": middle["cost_usd"] / 1e6,
                "at 45 to 35 %": f"{low['cost_usd'] / 1e6:.1f} to {high['cost_usd'] / 1e6:.1f}",
                "lesson $M": run.lesson_usd / 1e6,
                "published, M": run.gpu_hours / 1e6,
                "so $M": run.gpu_hours * middle["price_usd_per_gpu_hour"] / 1e6,
                "used": middle["flops"] / (run.gpu_hours * 3600 * peak),
                "planner $M": answer["run"]["cost_usd"] / 1e6 if answer else None,
            }
        )
    return Report(
        "Exercise 4: the cost of a run",
        [Table("6 N tokens at the strategy's utilization", rows)],
        {"rows": rows},
        [
            *[
                f"{r['run']}: ${r['$M']:.1f}M by the formula and ${r['so $M']:.1f}M by the published hours; the lesson says ${r['lesson $M']:.1f}M."
                for r in rows
            ],
            "Published hours hold restarts and later stages too: the share used that follows is below the steady one (38 to 43 % for Llama 3).",
            *[f"{run.name}: {run.source}." for run in RUNS],
            *reasons,
        ],
        [
            "A mixture costs its active parameters (37B of 671B), and DeepSeek's $5.6M is GPU-hours at $2: at the lesson's $3.50 it would be $9.8M."
        ],
    )


# --- 5: ZeRO-Offload ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """What stands beside the GPUs of one node."""

    memory_bytes: float = 512e9
    nvme_bytes: float = 2e12
    memory_bandwidth_bytes_per_s: float = 204.8e9  # 8 channels of DDR4-3200, one socket
    nvme_read_bytes_per_s: float = 25e9  # ZeRO-Infinity's DGX-2 node (arXiv:2104.07857, section 6)
    nvme_write_bytes_per_s: float = 25e9


def offload_plan(parameters: float, gpus: int, capacity_bytes: float, host: Host) -> list[dict[str, Any]]:
    """Where 16 bytes a parameter may live: on the GPUs, the optimizer in host memory, on NVMe, and the gradients out too."""
    state, gradients, weights = 12 * parameters, 2 * parameters, 2 * parameters
    options = [
        ("all on the GPUs", weights + gradients + state, 0.0, 0.0),
        ("optimizer in host memory (ZeRO-Offload)", weights, gradients + state, 0.0),
        ("optimizer on NVMe (ZeRO-Infinity), gradients on the GPUs", weights + gradients, 0.0, state),
        ("optimizer on NVMe, gradients to host memory", weights, gradients, state),
    ]
    return [
        {
            "where": name,
            "GB a GPU": device / gpus / GB,
            "host GB": ram / GB,
            "NVMe GB": disk / GB,
            "fits": "yes" if device / gpus <= capacity_bytes and ram <= host.memory_bytes and disk <= host.nvme_bytes else "no",
        }
        for name, device, ram, disk in options
    ]


def optimizer_seconds(parameters: float, host: Host) -> dict[str, float]:
    """Adam on the host with states on NVMe: 12 bytes a parameter read and 12 written, streamed; memory traffic of 28 bytes a parameter runs beside it."""
    disk = max(12 * parameters / host.nvme_read_bytes_per_s, 12 * parameters / host.nvme_write_bytes_per_s)
    memory = 28 * parameters / host.memory_bandwidth_bytes_per_s
    return {"nvme": disk, "host_memory": memory, "seconds": max(disk, memory)}


def zero_offload(planner: Planner | None = None) -> Report:
    """Exercise 5: 70B on 4 GPUs in place of 16, with 512 GB of host memory and 2 TB of NVMe."""
    n, gpus, host = 70e9, 4, Host()
    gpu = load_gpu("a100-80gb")
    rate = 0.40 * gpu.peak_flops["bf16"] * gpus
    step = optimizer_seconds(n, host)
    rows = []
    for tokens in (8_192, 32_768, 65_536, 131_072, 524_288, 4_194_304):
        compute = 8 * n * tokens / rate
        rows.append({"tokens a step": tokens, "compute s": compute, "optimizer s": step["seconds"], "slower by": step["seconds"] / compute})
    window = [rate * step["seconds"] / (share * 8 * n) for share in (0.5, 0.3)]
    spec = {
        "model": "llama-3.1-70b",
        "cluster": {"gpu": "a100-80gb", "nodes": 1, "gpus_per_node": gpus, "host_memory_gb": 512},
        "training": {"seq_len": 4096, "global_batch_size": 16},
        "strategy": {"framework": "deepspeed", "sharding": "zero3", "offload": "optimizer-nvme", "recompute": "full"},
    }
    answer, reason = planned(planner, spec)
    beside = []
    if answer:
        free, _ = planned(planner, {**spec, "strategy": {**spec["strategy"], "offload": "none"}})  # type: ignore[dict-item]
        for name, found in (("optimizer on NVMe", answer), ("no offload", free)):
            if found:
                beside.append(
                    {
                        "planner": name,
                        "fits": "yes" if found["fits"] else "no",
                        "peak GB a GPU": found["memory"]["peak_bytes"] / GB,
                        "host GB": found["memory"]["host_bytes_per_node"] / GB,
                        "NVMe GB": found["memory"]["nvme_bytes_per_node"] / GB,
                        "step s": found["time"]["step_s"],
                        "offload s": found["time"]["breakdown"]["offload"],
                    }
                )
    small = simulate.offload(ranks=4, gpus=gpus, params_billions=70, hidden=8192, layers=80, tflops=0.40 * gpu.peak_flops["bf16"] / 1e12)
    tables = [
        Table("Where the state may live", offload_plan(n, gpus, gpu.capacity_bytes, host)),
        Table("A step with the optimizer on NVMe", rows),
    ]
    return Report(
        "Exercise 5: ZeRO-Offload, 70B on 4 GPUs, 512 GB of host memory, 2 TB of NVMe",
        [*tables, *([Table("The planner, 16 sequences of 4,096 tokens", beside)] if beside else []), *small.tables],
        {"rows": rows, "tokens_for_50_to_30_percent": window, "optimizer_seconds": step, "planner": beside},
        [
            "Forward, backward and recomputation are 8 N tokens FLOPs at 40 % of 4 A100s; NVMe at 25 GB/s each way (ZeRO-Infinity's node).",
            f"Steps are 50 to 30 % slower at {window[0]:,.0f} to {window[1]:,.0f} tokens a step; 4M tokens hide it, 8,192 are 3.7 times slower.",
            *([reason] if reason else []),
        ],
        [
            "512 GB of host memory do not hold 70B's optimizer (12 bytes a parameter, 840 GB): it must live on NVMe: ZeRO-Infinity, not ZeRO-Offload.",
            "30 to 50 % is no constant: the optimizer step takes the same time however many tokens a step has.",
        ],
    )


def exercises(planner: Planner | None = None) -> dict[str, Callable[[], Report]]:
    """The five by name, in order."""
    return {
        "exercise 1": checkpointing,
        "exercise 2": one_forward_one_backward,
        "exercise 3": gradient_accumulation,
        "exercise 4": lambda: cost(planner),
        "exercise 5": lambda: zero_offload(planner),
    }
