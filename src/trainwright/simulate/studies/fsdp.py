"""ZeRO-1, 2, 3 (FSDP) and HSDP: who holds what when, and what it costs in traffic."""

from __future__ import annotations

from typing import Annotated, Any

from ..check import Comparison, compare
from ..fsdp import Optimizer
from ..layout import Layout
from ..report import Report, Table
from ..traffic import states_bytes
from . import Study
from .common import Batch, Length, Micro, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, limited, model

NAMES = {0: "none (DDP)", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 / FSDP"}


def units(c: Comparison, purposes: tuple[str, ...] = ("weights", "gradients", "replicas")) -> float:
    """Traffic of a step in units of (n-1)/n of the weights' bytes, n the sharded ranks (all of them without sharding), the mean over ranks."""
    n = c.layout.dp_shard if c.layout.zero else c.layout.dp_replicate
    total = sum(sum(c.distributed.traffic.bytes_by_rank(tag).values()) for tag in purposes)
    whole = c.config.parameter_count * 8 * (n - 1) / n
    return total / len(c.batches) / c.layout.world_size / whole if whole else 0.0


def _held(c: Comparison) -> dict[str, int]:
    """What rank 0 held at the end of the first backward."""
    return next(held for label, held in c.distributed.ledgers[0].moments if label == "backward done")


def _stage_row(stage: int, c: Comparison) -> dict[str, Any]:
    held, formula = _held(c), states_bytes(c.config, c.layout, 0, Optimizer())
    return {
        "stage": NAMES[stage],
        "weights": held["parameters"] + held["gathered"],
        "gradients": held["gradients"],
        "Adam": held["optimizer"],
        "formula, sum": sum(formula.values()),
        "peak of the step": c.distributed.ledgers[0].peak,
        "traffic, units": units(c),
        "relative error": c.difference.relative,
    }


def _moments(c: Comparison, rows: int = 60) -> Table:
    """Rank 0's memory through the first step."""
    found = []
    for label, held in c.distributed.ledgers[0].moments:
        found.append(
            {
                "moment": label,
                **{k: held[k] for k in ("parameters", "gathered", "gradients", "optimizer", "activations")},
                "sum": sum(v for k, v in held.items() if k != "host"),
            }
        )
        if label == "optimizer step":
            break
    return Table("Rank 0 through the first step (bytes held)", found[:rows])


def _notes(ranks: int, replicas: int, microbatches: int) -> list[str]:
    notes = ["One unit is (n-1)/n of the weights' bytes, sent by every rank: a reduce-scatter or an all-gather; an all-reduce is two."]
    if microbatches > 1:
        notes.append(
            f"With {microbatches} microbatches ZeRO-2 reduces {microbatches} times and ZeRO-3 gathers and reduces for each; DDP and ZeRO-1 reduce once."
        )
    if replicas > 1:
        shard = ranks // replicas
        notes.append(
            f"HSDP: all-gathers and reduce-scatters stay among {shard} ranks; only 1/{shard} of the gradient bytes crosses between the {replicas} replicas."
        )
    return notes


def fsdp(
    ranks: Ranks = 4,
    zero: Annotated[int, "Stage whose step is shown in full: 0, 1, 2 or 3."] = 3,
    replicas: Annotated[int, "Above 1: HSDP, sharding within ranks / replicas of them and summing over the replicas."] = 1,
    batch: Batch = 9,
    length: Length = 8,
    steps: Steps = 5,
    microbatches: Micro = 1,
    reshard_after_forward: Annotated[bool, "Free gathered weights after forward too."] = True,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """Weights, gradients and Adam states cut over N ranks: the same training, 1/N of the memory.

    Traffic: 2, 2 and 3 units for ZeRO-1, 2 and 3, and 2 for plain data parallelism.
    """
    check_sizes(ranks, batch, length, steps)
    limited(zero, 3, "zero", 0)
    config = model(model_name)
    legal = [d for d in range(1, ranks + 1) if ranks % d == 0]
    limited(replicas, ranks, "replicas")
    if ranks % replicas:
        from ...errors import SpecError

        raise SpecError(f"{ranks} ranks do not divide into {replicas} replicas", "replicas", legal)
    options: dict[str, Any] = {"batch": batch, "length": length, "steps": steps, "seed": seed}

    def layout(stage: int) -> Layout:
        if stage == 0:
            return Layout(dp_replicate=ranks, microbatches=microbatches)
        return Layout(
            dp_replicate=replicas,
            dp_shard=ranks // replicas,
            zero=stage,
            microbatches=microbatches,
            reshard_after_forward=reshard_after_forward,
        )

    runs = {stage: compare(config, layout(stage), **options) for stage in range(4)}
    chosen = runs[zero]
    table, equal = bytes_table(chosen)
    return Report(
        f"{'HSDP' if replicas > 1 else 'Sharded data parallel'} on {ranks} ranks, {NAMES[zero]} in full",
        [
            Table("The stages: rank 0 at the end of backward (bytes), traffic of a step", [_stage_row(s, c) for s, c in runs.items()]),
            _moments(chosen),
            against_one_device(chosen),
            table,
        ],
        {
            **figures(chosen, equal),
            "units": {NAMES[s]: units(c) for s, c in runs.items()},
            "states": {NAMES[s]: _held(c) for s, c in runs.items()},
        },
        _notes(ranks, replicas, microbatches),
    )


STUDY = Study("fsdp", fsdp, "trainwright simulate fsdp --ranks 4 --zero 3", ("zero", "zero3", "hsdp"))
