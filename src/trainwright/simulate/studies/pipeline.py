"""Pipeline parallelism: any schedule's action lists executed on real arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ...errors import SpecError
from ...schedules import SCHEDULES
from ...schedules.replay import schedule as replay
from ...schedules.torch_csv import read_csv
from ..check import Comparison, compare
from ..layout import Layout
from ..pipeline import plan
from ..report import Report, Table
from . import Study
from .common import (
    Batch,
    Layers,
    Length,
    Micro,
    Model,
    Ranks,
    Seed,
    Steps,
    against_one_device,
    bytes_table,
    check_sizes,
    figures,
    limited,
    model,
)


def _peaks(c: Comparison) -> list[int]:
    return [ledger.most["activations"] for ledger in c.distributed.ledgers]


def _row(c: Comparison) -> dict[str, Any]:
    lists = plan(c.config, c.layout)
    timed = replay(lists.table, c.layout.pp, c.layout.microbatches, forward=1, backward=1, weight=1)
    return {
        "schedule": lists.table.name,
        "stages": len(lists.units),
        "backward": "I + W" if lists.splits_backward else "B",
        "relative error": c.difference.relative,
        "bubble idle/total": timed.bubble_total,
        "peak activations (bytes)": max(_peaks(c)),
        "messages": sum(n.messages for k, n in c.distributed.traffic.counts.items() if k.tag == "pp") // len(c.batches),
        "weight copies": max(len(ranks) for ranks in lists.holders().values()),
    }


def _every(ranks: int, microbatches: int, config: Any, options: dict[str, Any]) -> Report:
    rows, refused, worst = [], [], 0.0
    for name in SCHEDULES:
        try:
            c = compare(config, Layout(pp=ranks, microbatches=microbatches, schedule=name), **options)
        except SpecError as error:
            refused.append(f"{name}: {error}")
            continue
        worst = max(worst, c.difference.relative)
        rows.append(_row(c))
    return Report(
        f"Every pipeline schedule on {ranks} ranks with {microbatches} microbatches",
        [Table("Executed on the same weights and tokens", rows)],
        {"largest_relative_error": worst, "executed": len(rows), "refused": refused},
        [
            "Bubbles from the replay of the same lists, forward, input gradient and weight gradient 1 each; memory, messages and errors are counted here.",
            *[f"Not possible here: {reason}" for reason in refused],
        ],
    )


def pipeline(
    schedule: Annotated[
        str, "A schedule of `trainwright schedule`, a PyTorch schedule file (x.csv, for its ranks and microbatches), or all."
    ] = "1f1b",
    ranks: Ranks = 4,
    microbatches: Micro = 8,
    virtual_stages: Annotated[int, "Model chunks of a rank; 0: what the schedule takes by default."] = 0,
    layers: Layers = 6,
    batch: Batch = 8,
    length: Length = 8,
    steps: Steps = 5,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """The model cut into stages, the batch into microbatches, and a schedule's lists executed on real arrays: the same gradients as one device."""
    check_sizes(ranks, batch, length, steps)
    config = model(model_name, layers=limited(layers, 128, "layers"))
    options: dict[str, Any] = {"batch": batch, "length": length, "steps": steps, "seed": seed}
    if schedule == "all":
        return _every(ranks, microbatches, config, options)
    if schedule.lower().endswith(".csv"):
        lists = read_csv(Path(schedule))
        ranks, microbatches, name = lists.placement.ranks, lists.placement.microbatches, lists.name
        layout = Layout(pp=ranks, microbatches=microbatches, schedule=lists)
    else:
        name = SCHEDULES.get_or_raise(schedule, "schedule").name
        layout = Layout(pp=ranks, microbatches=microbatches, schedule=name, virtual_stages=virtual_stages)
    c = compare(config, layout, **options)
    table, equal = bytes_table(c)
    stages = plan(config, layout)
    words = {0: "embedding", config.head_unit: "head"}
    holds = [
        {
            "rank": r,
            "stages": ", ".join(map(str, stages.stages_of(r))),
            "holds": ", ".join(words.get(u, str(u)) for u in sorted(stages.units_of(r))),
            "first actions": " ".join(str(a) for a in stages.table.lists[r][:8]),
            "activations kept at most (bytes)": peak,
        }
        for r, peak in enumerate(_peaks(c))
    ]
    return Report(
        f"Pipeline {name}: {ranks} ranks, {microbatches} microbatches",
        [
            Table("Who holds what and begins how", holds),
            against_one_device(c),
            Table("The schedule", [_row(c)]),
            table,
        ],
        figures(c, equal),
        [
            "A boundary carries one microbatch's tokens x hidden forward and the same back; the order changes memory and idle time, never the gradients."
        ],
    )


STUDY = Study(
    "pipeline", pipeline, "trainwright simulate pipeline --schedule zb-h1 --ranks 4 --microbatches 8", ("pp", "pipeline-parallel")
)
