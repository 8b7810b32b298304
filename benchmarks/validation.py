"""Scores every published run in benchmarks/data and writes docs/validation.md with its two pictures.

    python benchmarks/validation.py

Errors carry their sign (predicted / measured - 1, negative = too fast or too small). Peers' figures are those of the literature on rows that
nobody tuned for, each with its source.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import trainwright as tw
from trainwright.measure.calibrate import calibrate
from trainwright.measure.compare import Comparison, Summary, by_key, coverage, rank_correlation, summarize
from trainwright.measure.record import read_records
from trainwright.report.scatter import scatter_svg

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PEERS = """| estimator | rows | mean error | source |
|---|---|---|---|
| Calculon | 109 multi-node A100 runs of vTrain | 15 to 20 % | run by us on the published rows |
| llm-analysis 0.2.2, efficiency 0.5 | the same | 17.7 % | run by us |
| one fitted constant times FLOPs | the same | 17.9 % | run by us |
| SimuMax 1.2, own machine, one node of 8 B200 | 43 of its own rows | 5.6 % time, 0.46 % memory | its documentation |
"""


def percent(x: float | None, sign: bool = False) -> str:
    return "" if x is None else f"{100 * x:+.1f} %" if sign else f"{100 * x:.1f} %"


def table(title: str, groups: dict[str, Summary]) -> list[str]:
    lines = [f"| {title} | rows | median | mean | p90 | largest | median, signed |", "|---|--:|--:|--:|--:|--:|--:|"]
    for key, s in groups.items():
        cells = (key, str(s.rows), percent(s.median), percent(s.mean), percent(s.p90), percent(s.largest), percent(s.bias, sign=True))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def regime(c: Comparison) -> str:
    if c.estimate.model.is_moe:
        return "mixture of experts"
    if c.record.spec["training"].get("method", "full") != "full":
        return "adapters"
    p = c.estimate.plan
    return "data parallel only" if p.tp * p.pp * p.cp == 1 else "tensor, pipeline or context parallel"


KEYS: tuple[tuple[str, Callable[[Comparison], str]], ...] = (
    ("source", lambda c: c.record.id.rsplit("-", 1)[0]),
    ("framework", lambda c: c.estimate.plan.structure.framework),
    ("GPU", lambda c: c.estimate.cluster.gpu.id),
    ("precision", lambda c: c.estimate.job.precision),
    ("regime", regime),
)


def mean_rank(rows: list[Comparison]) -> float:
    groups: dict[str, list[Comparison]] = {}
    for c in rows:
        if c.record.step_s:
            groups.setdefault(c.record.group, []).append(c)
    rate = lambda c, s: c.estimate.job.tokens_per_step / s / c.estimate.plan.gpus  # noqa: E731
    found = [
        rank_correlation([rate(c, c.estimate.step_s) for c in g], [rate(c, c.record.step_s) for c in g])
        for g in groups.values()
        if len(g) >= 8
    ]
    return statistics.fmean(r for r in found if r is not None)


def calibrated(rows: list[Comparison], learn: int = 5, draws: int = 40) -> list[str]:
    """Errors on the other runs of a cluster and software after `calibrate` on a few of them, drawn at random, beside those without."""
    groups: dict[str, list[Comparison]] = {}
    for c in rows:
        if c.time_error is not None:
            groups.setdefault(c.record.group, []).append(c)
    draw = random.Random(0)
    before: list[float] = []
    after: list[float] = []
    worse: list[float] = []
    groups = {name: g for name, g in groups.items() if len(g) >= learn + 3}
    for g in groups.values():
        b: list[float] = []
        a: list[float] = []
        for _ in range(draws):
            mixed = draw.sample(g, len(g))
            factor = calibrate(mixed[:learn]).factors[0].factor
            b += [abs(c.time_error or 0.0) for c in mixed[learn:]]
            a += [abs((1 + (c.time_error or 0.0)) * factor - 1) for c in mixed[learn:]]
        worse += [x for x in [statistics.fmean(a) - statistics.fmean(b)] if x > 1e-9]
        before += b
        after += a
    points = 100 * max(worse, default=0.0)
    row = lambda name, e: f"| {name} | {percent(statistics.median(e))} | {percent(statistics.fmean(e))} |"  # noqa: E731
    return [
        "## After calibration",
        "",
        f"`trainwright calibrate` on {learn} runs of a group (one source, model and GPU), errors of its others: {len(groups)} groups of {learn + 3} or more,",
        f"{draws} draws each. In {len(worse)} groups the mean over the draws is worse than without, by at most {points:.2f} percentage points.",
        "",
        "| step time | median | mean |",
        "|---|--:|--:|",
        row("without", before),
        row(f"after {learn} runs", after),
        "",
    ]


def section(title: str, rows: list[Comparison], error: Callable[[Comparison], float | None]) -> list[str]:
    lines = [f"## {title}", ""]
    for name, key in KEYS:
        lines += table(name, by_key(rows, key, error))
    worst = sorted((c for c in rows if error(c) is not None), key=lambda c: -abs(error(c) or 0))[:10]
    lines += ["The ten worst:", "", "| run | error | layout |", "|---|--:|---|"]
    for c in worst:
        p = c.estimate.plan
        layout = (
            f"{c.estimate.model.family}, {p.gpus} GPUs, dp {p.dp} tp {p.tp} pp {p.pp} cp {p.cp} ep {p.ep}, micro-batch {p.micro_batch_size}"
        )
        lines.append(f"| {c.record.id} | {percent(error(c), sign=True)} | {layout}, {c.record.spec['training']['precision']} |")
    return [*lines, ""]


def main() -> None:
    records = read_records(HERE / "data" / "published_runs.jsonl")
    tuning = read_records(HERE / "data" / "published_finetuning.jsonl")
    answers = tw.estimate_many([r.spec for r in (*records, *tuning)])
    rows = [Comparison(r, e) for r, e in zip((*records, *tuning), answers)]
    training, fine = rows[: len(records)], rows[len(records) :]
    time, memory = (lambda c: c.time_error), (lambda c: c.memory_error)
    points = [(c.record.step_s, c.estimate.step_s, c.estimate.plan.structure.framework, c.record.id) for c in training if c.record.step_s]
    (DOCS / "validation-time.svg").write_text(scatter_svg(points, "Step time of published runs", "s"))
    gb = [(c.record.peak_bytes / 1e9, c.predicted_peak / 1e9, c.record.peak_kind, c.record.id) for c in rows if c.record.peak_bytes]
    (DOCS / "validation-memory.svg").write_text(scatter_svg(gb, "Peak memory of published runs", "GB"))
    unfit = sum(not c.estimate.fits for c in training)
    overall = {
        "step time, pre-training": summarize(map(time, training)),
        "step time, fine-tuning": summarize(map(time, fine)),
        "peak memory, pre-training": summarize(map(memory, training)),
        "peak memory, fine-tuning": summarize(map(memory, fine)),
    }
    lines = [
        "# Validation",
        "",
        "Made by `make validation` from the published runs in `benchmarks/data`, each with its source. The constants of the time model were fitted on",
        "these same pre-training rows (leave-one-source-out errors: `docs/log.md`), so the errors of new sources are larger; memory rules are not fitted",
        "per row. Errors are predicted / measured - 1.",
        "",
        *table("all", {k: s for k, s in overall.items() if s}),
        f"The 80 % interval of step time holds {percent(coverage(training))} of the pre-training rows. Mean rank correlation inside groups of 8 or more: "
        f"{mean_rank(training):.3f}. Measured runs that are said not to fit: {unfit} of {len(training)}.",
        "",
        "![step time](validation-time.svg)",
        "",
        "![peak memory](validation-memory.svg)",
        "",
        *calibrated(training),
        "## Peers",
        "",
        PEERS,
        *section("Step time, pre-training", training, time),
        *section("Step time, fine-tuning", fine, time),
        *section("Peak memory", rows, memory),
    ]
    (DOCS / "validation.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
