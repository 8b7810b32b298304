"""Fits the constants of `catalog/kernels.toml` and of the frameworks' time rules to published runs, and says how well they hold on what was left out.

    python benchmarks/fit_step.py RUNS.jsonl [--leave-out source|gpu|group] [--iterations 6]

RUNS.jsonl has one run a line: {"id", "group", "spec", "measured": {"step_s"}}. Every constant has a physical meaning, a prior and a range (`PARAMETERS`);
none belongs to a row, a source or a model. The fit is damped Gauss-Newton on log seconds with a soft-L1 loss; each row weighs 1 / (rows of its
group)^(1/4), so that long tables do not outvote short ones. Leaving out is by linearization: the rest is solved again from the fitted point with the
same Jacobian, and the rows left out are predicted exactly with what that gives.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trainwright.cost.pieces as pieces_module
import trainwright.cost.step as step_module
from trainwright.cost.kernels import constants
from trainwright.cost.step import Settings, exact
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.frameworks import FRAMEWORKS
from trainwright.resolve import resolve
from trainwright.spec.run import validate

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """`path` into kernels.toml, or ("rules", frameworks joined by +, field[, index])."""

    name: str
    path: tuple[Any, ...]
    prior: float
    low: float
    high: float


PARAMETERS = (
    Parameter("sustained share, Volta", ("arch", "volta", "sustained"), 0.65, 0.4, 0.9),
    Parameter("sustained share, Ampere", ("arch", "ampere", "sustained"), 0.70, 0.5, 0.9),
    Parameter("sustained share, Hopper", ("arch", "hopper", "sustained"), 0.66, 0.4, 0.9),
    Parameter("sustained share, Blackwell", ("arch", "blackwell", "sustained"), 0.55, 0.35, 0.9),
    Parameter("power exponent", ("power", "exponent"), 0.75, 0.6, 0.9),
    Parameter("8-bit products, Hopper", ("arch", "hopper", "fp8"), 0.9, 0.5, 1.1),
    Parameter("8-bit products, Blackwell", ("arch", "blackwell", "fp8"), 1.0, 0.5, 1.2),
    Parameter("4-bit products, Blackwell", ("arch", "blackwell", "fp4"), 0.7, 0.3, 1.1),
    Parameter("FlashAttention 1, Ampere", ("attention", "fa1", "share"), 0.3, 0.1, 0.5),
    Parameter("FlashAttention 1, Hopper", ("attention", "fa1_hopper", "share"), 0.19, 0.1, 0.4),
    Parameter("FlashAttention 2, Hopper", ("attention", "fa2_hopper", "share"), 0.35, 0.25, 0.45),
    Parameter("cuDNN attention, Hopper", ("attention", "cudnn_hopper", "share"), 0.54, 0.4, 0.65),
    Parameter("attention, Blackwell", ("attention", "blackwell", "share"), 0.40, 0.3, 0.6),
    Parameter("memory bandwidth", ("memory", "share"), 0.87, 0.75, 0.95),
    Parameter("misaligned to 128 bytes", ("matmul", "misaligned"), 0.5, 0.0, 1.0),
    Parameter("unaligned batched products", ("matmul", "unaligned_batched"), 1.5, 0.5, 3.0),
    Parameter("floor of a step", ("step", "floor_s"), 0.011, 0.004, 0.02),
    Parameter("jitter a doubling of nodes", ("step", "jitter"), 0.005, 0.0, 0.01),
    Parameter("slowdown by hidden traffic", ("overlap", "slowdown"), 0.15, 0.05, 0.4),
    Parameter("software a year", ("software", "rate"), 0.06, 0.0, 0.12),
    Parameter("ZeRO-3 gathers before 2022", ("rules", "deepspeed", "gather_slowdown", 0), 5.0, 2.0, 8.0),
    Parameter("launch, Megatron-DeepSpeed", ("rules", "deepspeed", "host_s_per_kernel", 0), 50e-6, 10e-6, 90e-6),
    Parameter("launch, PyTorch eager", ("rules", "fsdp1+fsdp2+ddp", "host_s_per_kernel", 0), 20e-6, 8e-6, 40e-6),
    Parameter("launch, Megatron-Core", ("rules", "megatron", "host_s_per_kernel", 1), 20e-6, 8e-6, 30e-6),
    Parameter("launches of an expert", ("rules", "megatron", "host_s_per_expert"), 60e-6, 10e-6, 200e-6),
    Parameter("wait for token counts", ("rules", "megatron", "host_s_per_dispatch"), 8e-4, 1e-4, 3e-3),
    Parameter("hidden expert traffic", ("rules", "megatron", "hides_ep"), 0.3, 0.0, 0.7),
    Parameter("hidden TP traffic, Megatron", ("rules", "megatron", "hides_tp"), 0.85, 0.5, 1.0),
    Parameter("residual of DP traffic", ("rules", "megatron+deepspeed+fsdp1+fsdp2+ddp", "dp_residual"), 0.25, 0.05, 0.5),
)


@dataclass(frozen=True)
class Row:
    id: str
    group: str
    source: str
    gpu: str
    step_s: float
    inputs: tuple[Any, ...]  # model, cluster, job, plans, messages


def read(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text("utf-8").splitlines():
        r = json.loads(line)
        run = resolve(validate(r["spec"]))
        table = PlanTable.from_plans([run.plan])
        inputs = (run.model, run.cluster, run.job, table, traffic(run.model, run.cluster, run.job, table))
        rows.append(Row(r["id"], r["group"], r["id"].rsplit("-", 1)[0], run.cluster.gpu.id, r["measured"]["step_s"], inputs))
    return rows


def settings(values: Sequence[float]) -> Settings:
    table = copy.deepcopy(dict(constants()))
    rules = {name: f.time for name, f in FRAMEWORKS.items()}
    for p, value in zip(PARAMETERS, values):
        if p.path[0] != "rules":
            place = table
            for key in p.path[:-1]:
                place = place[key]
            place[p.path[-1]] = float(value)
            continue
        for name in p.path[1].split("+"):
            change: Any = float(value)
            if len(p.path) == 4:
                pairs = list(getattr(rules[name], p.path[2]))
                i = min(p.path[3], len(pairs) - 1)
                pairs[i] = (pairs[i][0], float(value))
                change = tuple(pairs)
            rules[name] = replace(rules[name], **{p.path[2]: change})
    return Settings(table, rules)


def shipped() -> Array:
    """The values in the catalogue and the frameworks' files."""
    found = []
    for p in PARAMETERS:
        if p.path[0] == "rules":
            value: Any = getattr(FRAMEWORKS[p.path[1].split("+")[0]].time, p.path[2])
            found.append(value[min(p.path[3], len(value) - 1)][1] if len(p.path) == 4 else value)
            continue
        value = constants()
        for key in p.path:
            value = value[key]
        found.append(value)
    return np.array(found, dtype=float)


def remember_prices() -> None:
    """Messages cost the same whatever is fitted: each table's are priced once. The second replay of each plan only splits the breakdown."""
    known: dict[int, list[Array]] = {}
    price, replayed = pieces_module.price, step_module.replayed

    def once(cluster: Any, table: PlanTable, messages: Any) -> list[Array]:
        if id(table) not in known:
            known[id(table)] = price(cluster, table, messages)
        return [s.copy() for s in known[id(table)]]

    def only_full(*args: Any) -> float:
        return replayed(*args) if args[6] or args[7] else np.inf

    pieces_module.price = once  # type: ignore[assignment]
    step_module.replayed = only_full  # type: ignore[assignment]


def predict(values: Sequence[float], rows: Sequence[Row]) -> Array:
    with_values = settings(values)
    return np.array([exact(*row.inputs, with_values).step_s[0] for row in rows])


def summary(error: Array) -> str:
    a = 100 * np.abs(error)
    return f"median {np.median(a):.2f} mean {a.mean():.2f} p90 {np.quantile(a, 0.9):.2f} over {len(a)}"


class Fit:
    """Damped Gauss-Newton with a soft-L1 loss of scale 0.05 in log seconds."""

    scale = 0.05

    def __init__(self, rows: Sequence[Row], prior: float = 0.15) -> None:
        self.rows = list(rows)
        self.low, self.high = (np.array([getattr(p, n) for p in PARAMETERS]) for n in ("low", "high"))
        self.prior = np.array([p.prior for p in PARAMETERS])
        self.size = np.maximum(0.5 * self.prior, 1e-9)
        self.ridge = prior * self.scale
        self.y = np.log([r.step_s for r in rows])
        counts = Counter(r.group for r in rows)
        self.weight = np.array([counts[r.group] ** -0.25 for r in rows])
        self.touched: list[NDArray[np.intp] | None] = [None] * len(PARAMETERS)

    def residual(self, x: Array, chosen: NDArray[np.intp] | None = None) -> Array:
        rows = self.rows if chosen is None else [self.rows[i] for i in chosen]
        y = self.y if chosen is None else self.y[chosen]
        return np.asarray(np.log(predict(x, rows)) - y)

    def jacobian(self, x: Array, r: Array) -> Array:
        found = np.zeros((len(self.rows), len(x)))
        for k in range(len(x)):
            step = 0.02 * self.size[k]
            z = x.copy()
            z[k] += step if x[k] + step <= self.high[k] else -step
            chosen = np.arange(len(self.rows)) if self.touched[k] is None else self.touched[k]
            if len(chosen):
                found[chosen, k] = (self.residual(z, chosen) - r[chosen]) / (z[k] - x[k])
            if self.touched[k] is None:
                self.touched[k] = np.flatnonzero(np.abs(found[:, k]) * self.size[k] > 1e-6)
        return found

    def loss(self, r: Array, x: Array, keep: Array) -> float:
        soft = 2 * self.scale**2 * (np.sqrt(1 + (r / self.scale) ** 2) - 1)
        return float((keep * self.weight**2 * soft).sum() + ((self.ridge * (x - self.prior) / self.size) ** 2).sum())

    def move(self, x: Array, r: Array, jacobian: Array, keep: Array, damping: float) -> Array:
        w = keep * self.weight**2 / np.sqrt(1 + (r / self.scale) ** 2)
        pull = np.diag((self.ridge / self.size) ** 2)
        a = (jacobian * w[:, None]).T @ jacobian + pull
        g = (jacobian * w[:, None]).T @ r + pull @ (x - self.prior)
        return np.clip(x - np.linalg.solve(a + damping * np.diag(np.diag(a)), g), self.low, self.high)

    def run(self, x: Array, iterations: int) -> tuple[Array, Array, Array]:
        keep, damping = np.ones(len(self.rows)), 1e-3
        r, started = self.residual(x), time.time()
        jacobian = np.zeros((len(self.rows), len(x)))
        for iteration in range(iterations):
            jacobian = self.jacobian(x, r)
            before = self.loss(r, x, keep)
            for _ in range(6):
                z = self.move(x, r, jacobian, keep, damping)
                new = self.residual(z)
                if self.loss(new, z, keep) < before:
                    break
                damping *= 6
            else:
                break
            gain = 1 - self.loss(new, z, keep) / before
            x, r, damping = z, new, max(damping / 5, 1e-5)
            print(f"  {iteration}: {summary(np.expm1(r))}  ({time.time() - started:.0f} s)", flush=True)
            if gain < 4e-3:
                break
        return x, r, jacobian

    def without(self, x: Array, r: Array, jacobian: Array, out: NDArray[np.bool_]) -> Array:
        """The constants that the other rows give, by linearization around the fitted point."""
        keep = (~out).astype(float)
        z, q = x, r
        for _ in range(12):
            z = self.move(z, q, jacobian, keep, 1e-3)
            q = r + jacobian @ (z - x)
        return z


def left_out(fit: Fit, x: Array, r: Array, jacobian: Array, by: str) -> Array:
    error = np.zeros(len(fit.rows))
    names = np.array([getattr(row, by) for row in fit.rows])
    for name in sorted(set(names)):
        out = names == name
        z = fit.without(x, r, jacobian, out)
        chosen = np.flatnonzero(out)
        error[chosen] = np.expm1(fit.residual(z, chosen))
        print(f"  without {name:45s} {summary(error[chosen])}  (bias {100 * np.median(error[chosen]):+.1f})", flush=True)
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--skip", default="", help="ids that are known outliers, joined by commas: predicted, not fitted")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--leave-out", action="append", default=[], choices=("source", "gpu", "group"))
    parser.add_argument("--start", choices=("shipped", "prior"), default="shipped")
    args = parser.parse_args()
    remember_prices()
    rows = read(args.runs)
    skip = set(args.skip.split(","))
    fit = Fit([r for r in rows if r.id not in skip])
    start = shipped() if args.start == "shipped" else fit.prior
    x, r, jacobian = (
        fit.run(np.clip(start, fit.low, fit.high), args.iterations) if args.iterations else (start, fit.residual(start), np.zeros((1, 1)))
    )
    if args.iterations == 0 and args.leave_out:
        jacobian = fit.jacobian(x, r)
    for p, old, new in zip(PARAMETERS, start, x):
        print(f"  {p.name:32s} {old:10.4g} -> {new:10.4g}   prior {p.prior:.4g} in [{p.low:.4g}, {p.high:.4g}]")
    print("fitted, all rows:", summary(predict(x, rows) / np.array([row.step_s for row in rows]) - 1))
    for by in args.leave_out:
        print(f"left out by {by}:", summary(left_out(fit, x, r, jacobian, by)))


if __name__ == "__main__":
    sys.exit(main())
