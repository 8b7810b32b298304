"""Data parallelism: shards of the batch, one all-reduce of the gradients, and how the average is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from ..check import compare
from ..data import sequences_of
from ..layout import Layout
from ..model import Batch as Data
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def _shares(layout: Layout, batch: Data) -> list[dict[str, Any]]:
    """Each rank's sequences and tokens, and what they weigh in the two averages."""
    rows: list[dict[str, Any]] = []
    for rank in range(layout.data_parallel):
        ((lo, hi),) = sequences_of(layout, rank, batch.shape[0])
        tokens = int((batch.targets[lo:hi] >= 0).sum())
        rows.append(
            {
                "rank": rank,
                "sequences": hi - lo,
                "tokens with a loss": tokens,
                "weight by tokens": tokens / int((batch.targets >= 0).sum()),
                "weight as mean of means": 1 / layout.data_parallel,
            }
        )
    return rows


def data_parallel(
    ranks: Ranks = 4,
    batch: Batch = 10,
    length: Length = 16,
    steps: Steps = 5,
    padded: Annotated[bool, "End each sequence in padding at a place of its own, so that token counts differ more."] = False,
    bucket_bytes: Annotated[int, "DDP's buckets, filled from the last weight to the first; 0: one a block."] = 0,
    algorithm: Annotated[str, "How gradients are summed: ring or tree."] = "ring",
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """The batch over N ranks, gradients summed by an all-reduce: what one device computes, if tokens are weighed alike.

    With unequal shards the average of the ranks' averages is something else; both are shown.
    """
    check_sizes(ranks, batch, length, steps)
    config = model(model_name)
    layout = Layout(dp_replicate=ranks, bucket_bytes=bucket_bytes, all_reduce=algorithm)
    right = compare(config, layout, batch=batch, length=length, steps=steps, seed=seed, padded=padded)
    wrong = compare(config, replace(layout, average="ranks"), batches=right.batches, seed=seed, single=right.single)
    first = [
        compare(config, a, batches=right.batches[:1], seed=seed).difference.gradient_norm
        for a in (layout, replace(layout, average="ranks"))
    ]
    table, equal = bytes_table(right)
    shares = _shares(layout, right.batches[-1])
    averages = Table(
        "Two ways of averaging",
        [
            {
                "average": "over all tokens (right)",
                "loss": right.distributed.losses[-1],
                "first gradient off by": first[0],
                "weight error": right.difference.weights,
            },
            {
                "average": "mean of the ranks' means",
                "loss": wrong.distributed.losses[-1],
                "first gradient off by": first[1],
                "weight error": wrong.difference.weights,
            },
        ],
    )
    calls = sum(c.calls for k, c in right.distributed.traffic.counts.items() if k.rank == 0 and k.tag == "gradients") // steps
    uneven = len({r["tokens with a loss"] for r in shares}) > 1
    return Report(
        f"Data parallel on {ranks} ranks",
        [Table("Who has what in the last step", shares), against_one_device(right), averages, table],
        {**figures(right, equal), "gradient_error_mean_of_means": first[1], "all_reduces_per_step": calls},
        [
            f"Gradients travel in {calls} bucket(s) a step; a ring all-reduce sends 2 (n-1)/n of the gradient's bytes from every rank, a tree as much in sum.",
            "Shards are unequal: the mean of the ranks' means weighs the tokens of small shards more and is another gradient."
            if uneven
            else "Shards have as many tokens each: both averages are the same.",
        ],
    )


STUDY = Study("data-parallel", data_parallel, "trainwright simulate data-parallel --ranks 4 --batch 10 --padded", ("dp", "ddp"))
