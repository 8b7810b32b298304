"""Sequence parallelism: what tensor parallelism leaves whole is split by tokens, for the same bytes."""

from __future__ import annotations

from ..check import Comparison, compare
from ..layout import Layout
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def _row(name: str, c: Comparison) -> dict[str, object]:
    steps = len(c.batches)
    sent = c.distributed.traffic.bytes_by_rank("tp")
    held = [ledger.most["activations"] for ledger in c.distributed.ledgers]
    return {
        "layout": name,
        "activations kept, most of a rank (bytes)": max(held),
        "tp bytes a rank and step": max(sent.values(), default=0) // steps,
        "relative error": c.difference.relative,
    }


def sequence_parallel(
    ranks: Ranks = 4, batch: Batch = 3, length: Length = 16, steps: Steps = 5, model_name: Model = "dense", seed: Seed = 0
) -> Report:
    """Tensor parallelism with the tokens split outside of its products: an all-reduce becomes a reduce-scatter and an all-gather.

    Norms, residuals and saved inputs shrink by N; one more all-gather brings the saved input back in backward.
    """
    check_sizes(ranks, batch, length, steps)
    config = model(model_name)
    with_it = compare(config, Layout(tp=ranks, sequence_parallel=True), batch=batch, length=length, steps=steps, seed=seed)
    without = compare(config, Layout(tp=ranks), batches=with_it.batches, seed=seed)
    table, equal = bytes_table(with_it)
    return Report(
        f"Sequence parallel on {ranks} ranks",
        [
            Table("With and without", [_row("tensor parallel", without), _row("and sequence parallel", with_it)]),
            against_one_device(with_it),
            table,
        ],
        figures(with_it, equal),
        [
            "An all-reduce is a reduce-scatter and an all-gather: the same bytes, now at the two ends of what is split by tokens.",
            "The saved input of each product is a 1/N share and is gathered again for the weight gradient: 5 transfers of (n-1)/n a product pair, not 4.",
        ],
    )


STUDY = Study("sequence-parallel", sequence_parallel, "trainwright simulate sequence-parallel --ranks 4", ("sp",))
