"""Gradient accumulation: reduce once or each time, and the fault of averaging the microbatches' averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ..check import compare
from ..data import sequences_of
from ..layout import Layout
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Micro, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def accumulation(
    ranks: Ranks = 2,
    microbatches: Micro = 4,
    batch: Batch = 16,
    length: Length = 16,
    steps: Steps = 5,
    padded: Annotated[bool, "End each sequence in padding at a place of its own: unequal token counts."] = True,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """K microbatches, one optimizer step: reducing once at the end sends K times less than reducing each, for the same gradients.

    Dividing each microbatch's loss by its own token count (the fault that trainers had until October 2024) is another gradient wherever counts differ.
    """
    check_sizes(ranks, batch, length, steps)
    config = model(model_name)
    layout = Layout(dp_replicate=ranks, microbatches=microbatches)
    once = compare(config, layout, batch=batch, length=length, steps=steps, seed=seed, padded=padded)
    each = compare(config, replace(layout, reduce_every_microbatch=True), batches=once.batches, seed=seed, single=once.single)
    fault = compare(config, replace(layout, average="microbatches"), batches=once.batches, seed=seed, single=once.single)
    first = [compare(config, c.layout, batches=once.batches[:1], seed=seed).difference.gradient_norm for c in (once, each, fault)]
    table, equal = bytes_table(once)
    sent = [max(c.distributed.traffic.bytes_by_rank("gradients").values(), default=0) // steps for c in (once, each, fault)]
    rows = [
        {
            "how": name,
            "gradient bytes a rank and step": size,
            "loss": c.distributed.losses[-1],
            "first gradient off by": off,
            "weight error": c.difference.weights,
        }
        for name, size, off, c in zip(
            ("all tokens, reduce once (right)", "all tokens, reduce each microbatch", "mean of the microbatches' means"),
            sent,
            first,
            (once, each, fault),
        )
    ]
    last = once.batches[-1]
    counts = [[int((last.targets[lo:hi] >= 0).sum()) for lo, hi in sequences_of(layout, r, batch)] for r in range(ranks)]
    shares = [{"rank": r, **{f"microbatch {m}": n for m, n in enumerate(row)}} for r, row in enumerate(counts)]
    ratio = sent[1] / sent[0] if sent[0] else None
    return Report(
        f"Accumulation of {microbatches} microbatches on {ranks} ranks",
        [Table("Tokens with a loss in the last step", shares), Table("Three ways", rows), against_one_device(once), table],
        {**figures(once, equal), "traffic_ratio": ratio, "gradient_error_mean_of_means": first[2], "tokens": counts},
        [
            f"Reducing after every microbatch sends {ratio:g} times as much for the same gradients."
            if ratio
            else "One rank sends nothing.",
            "The right weight of a token is 1 / all tokens of the step: divide by the count of the whole batch, known before backward by summing one number.",
        ],
    )


STUDY = Study("accumulation", accumulation, "trainwright simulate accumulation --microbatches 4 --padded", ("gradient-accumulation",))
