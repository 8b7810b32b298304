"""Tensor parallelism: columns, then rows, and one exchange each way."""

from __future__ import annotations

from typing import Annotated

from ..check import compare
from ..collectives import bounds
from ..layout import Layout
from ..model import TinyConfig, parameters
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Model, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def pieces(config: TinyConfig, ranks: int) -> Table:
    """What each rank holds of the weights of a block, the embedding and the head."""
    rows = []
    for p in parameters(config):
        if p.unit not in (0, 1, config.head_unit):
            continue
        shapes = []
        for rank in range(ranks):
            cut = p.cut({"tp": ranks, "ep": 1}, {"tp": rank, "ep": 0})
            shapes.append("x".join(str(len(range(*s.indices(n)))) for s, n in zip(cut, p.shape)))
        dim = p.split["tp"][0] if "tp" in p.split else None
        rows.append(
            {
                "weight": p.name,
                "whole": "x".join(map(str, p.shape)),
                "cut by": "all hold it" if dim is None else ("rows" if dim == len(p.shape) - 2 else "columns"),
                "each rank": shapes[0] if len(set(shapes)) == 1 else ", ".join(shapes),
            }
        )
    return Table("What each rank holds", rows)


def tensor_parallel(
    ranks: Ranks = 4,
    batch: Batch = 3,
    length: Length = 16,
    steps: Steps = 5,
    vocab: Annotated[int, "Words; need not divide."] = 67,
    ffn: Annotated[int, "Feed-forward width; need not divide."] = 48,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """Weights by columns and then rows over N ranks: two all-reduces forward and two backward a block, none in between.

    The vocabulary is cut too: the embedding adds up what each rank has, and the loss needs three numbers a token, never the logits.
    """
    check_sizes(ranks, batch, length, steps)
    config = model(model_name, vocab=vocab, ffn=ffn)
    c = compare(config, Layout(tp=ranks), batch=batch, length=length, steps=steps, seed=seed)
    table, equal = bytes_table(c)
    tokens = batch * length
    logits = tokens * max(hi - lo for lo, hi in bounds(vocab, ranks)) * 8
    return Report(
        f"Tensor parallel on {ranks} ranks",
        [pieces(config, ranks), against_one_device(c), table],
        figures(c, equal),
        [
            f"An all-reduce carries tokens x hidden = {tokens} x {config.hidden}: 4 a block and step, 1 for the embedding, 1 for the head.",
            f"The loss exchanges 3 numbers a token ({3 * tokens * 8:,} bytes); gathering the logits would be {logits * (ranks - 1):,} bytes a rank.",
        ],
    )


STUDY = Study("tensor-parallel", tensor_parallel, "trainwright simulate tensor-parallel --ranks 3 --vocab 67", ("tp",))
