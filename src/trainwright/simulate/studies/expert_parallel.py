"""Expert parallelism: tokens travel to their experts; capacity, dropped tokens, imbalance."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from ...errors import SpecError
from ..check import compare
from ..collectives import bounds
from ..layout import Layout
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Ranks, Seed, Steps, against_one_device, bytes_table, check_sizes, figures, model


def expert_parallel(
    ranks: Ranks = 4,
    experts: Annotated[int, "Experts of a layer; need not divide."] = 8,
    top_k: Annotated[int, "Experts per token."] = 2,
    capacity_factor: Annotated[float, "Rows an expert takes, as a multiple of the even share; 0: all (dropless)."] = 0.0,
    batch: Batch = 8,
    length: Length = 16,
    steps: Steps = 5,
    seed: Seed = 0,
) -> Report:
    """Experts over N ranks that work on different tokens: two all-to-alls forward, two backward, as many rows as the router asks for.

    With a capacity, one device drops the same tokens: it is counted per rank and microbatch there too.
    """
    check_sizes(ranks, batch, length, steps)
    if capacity_factor < 0 or not np.isfinite(capacity_factor):
        raise SpecError(f"a capacity of {capacity_factor} times the even share", "capacity_factor", "1.25")
    config = model("moe", experts=experts, top_k=top_k, capacity_factor=capacity_factor or None)
    c = compare(config, Layout(dp_replicate=ranks, ep=ranks), batch=batch, length=length, steps=steps, seed=seed)
    table, equal = bytes_table(c)
    logs = [r for log in c.distributed.routing for r in log.values()]
    asked, kept = np.sum([r.asked for r in logs], axis=0), np.sum([r.kept for r in logs], axis=0)
    home = [rank for rank, (lo, hi) in enumerate(bounds(experts, ranks)) for _ in range(lo, hi)]
    load = [int(kept[lo:hi].sum()) for lo, hi in bounds(experts, ranks)]
    dropped = int(asked.sum() - kept.sum())
    rows = [
        {
            "expert": e,
            "on rank": home[e],
            "rows asked for": int(asked[e]),
            "rows kept": int(kept[e]),
            "of the even share": float(asked[e] / asked.mean()),
        }
        for e in range(experts)
    ]
    balance = {"expert": float(asked.max() / asked.mean()), "rank": max(load) / (sum(load) / ranks)}
    return Report(
        f"Expert parallel: {experts} experts on {ranks} ranks",
        [Table("Rows of every expert, over all layers and steps", rows), against_one_device(c), table],
        {**figures(c, equal), "dropped": dropped, "dropped_share": dropped / int(asked.sum()), "imbalance": balance, "rows_by_rank": load},
        [
            f"The busiest expert has {balance['expert']:.2f} times the even share, the busiest rank {balance['rank']:.2f}. A step is as long as the busiest.",
            f"{dropped} of {int(asked.sum())} rows were dropped ({dropped / int(asked.sum()):.1%}); a dropped row passes by on the residual."
            if capacity_factor
            else "Dropless: no capacity, rows as the router asks.",
        ],
    )


STUDY = Study("expert-parallel", expert_parallel, "trainwright simulate expert-parallel --ranks 4 --capacity-factor 1.0", ("ep", "moe"))
