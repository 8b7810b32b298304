"""The order of plans: better first, of equals the simpler, one of each family."""

from __future__ import annotations

import numpy as np

from ..cost.table import Column, IntColumn, PlanTable
from ..spec.plan import ParallelPlan

FAMILY = ("tp", "pp", "cp", "ep", "etp", "dp", "micro_batch_size")


def mechanisms(plan: ParallelPlan) -> int:
    """How many things a plan uses that could go wrong: axes, virtual stages, a schedule of its own, recomputation, sharding, offload.

    Offload counts three times: it needs the card, the bus and host memory to be right, and its time is the least certain of all.
    """
    s = plan.structure
    used = [plan.tp > 1, plan.pp > 1, plan.cp > 1, plan.ep > 1, plan.etp > 1, plan.virtual_stages > 1]
    used += [plan.dp_replicate > 1 and plan.dp_shard > 1, s.sharding != "none", s.recompute != "none", s.async_tp, s.compile]
    used += [plan.pp > 1 and s.schedule not in ("1f1b", "interleaved-1f1b")]
    return sum(used) + 3 * (s.offload != "none")


def ordered(table: PlanTable, value: Column, tie: float) -> IntColumn:
    """Rows best first: groups within `tie` of their best, inside a group the simpler plan first."""
    rank = np.argsort(value, kind="stable")
    found: list[int] = []
    start = 0
    while start < len(rank):
        end = int(np.searchsorted(value[rank], value[rank[start]] * (1 + tie), side="right"))
        group = [(int(i), table.plan(int(i))) for i in rank[start : max(end, start + 1)]]
        group.sort(key=lambda g: (mechanisms(g[1]), g[1].tp * g[1].pp * g[1].cp, g[1].virtual_stages, value[g[0]]))
        found += [i for i, _ in group]
        start = max(end, start + 1)
    return np.array(found, dtype=np.int64)


def families(table: PlanTable) -> IntColumn:
    """The same number for plans that differ in schedule, virtual stages or the split of data parallelism only."""
    kinds: dict[tuple[object, ...], int] = {}
    codes = [kinds.setdefault((s.sharding, s.recompute, s.offload, s.sequence_parallel), len(kinds)) for s in table.structures]
    columns = [getattr(table, n) for n in FAMILY] + [np.array(codes, dtype=np.int64)[table.structure]]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def firsts(group: IntColumn) -> IntColumn:
    """Positions at which a value appears for the first time, in order."""
    return np.sort(np.unique(group, return_index=True)[1]).astype(np.int64)
