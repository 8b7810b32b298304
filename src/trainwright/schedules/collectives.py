"""Adds each rank's collectives to a replay: FSDP parameter gathers and data-parallel gradient reductions, each on a
lane that runs one at a time beside the compute.

Parameters kept (`regather` False): a chunk is gathered once, in the order of first use, and reduced once, after its
last backward. Parameters resharded (`regather` True): a rank's list is cut into runs on the same chunk; each run
gathers what the run before did not hold, as soon as the run before that one has ended (two buffers), and reduces the
gradients it made.
"""

from __future__ import annotations

import numpy as np

from .actions import B, W
from .costs import Costs
from .graph import Nodes, order_nodes, sweep
from .timeline import Collective


def with_collectives(
    nodes: Nodes, costs: Costs, length: np.ndarray, delays: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, tuple[Collective, ...]]:
    """Start and end of the compute nodes, and the collectives with theirs."""
    n, ranks, width = len(nodes), len(nodes.first) - 1, nodes.needs.shape[1]
    gathers, reduces, extra_need = [], [], {}
    for rank in range(ranks):
        uses, made = _uses(nodes, rank, costs)
        gathers.append(uses)
        reduces.append(made)
    lanes = gathers + reduces
    total = n + sum(map(len, lanes))
    needs = np.full((total, width + 1), total)
    needs[:n, :width] = np.where(nodes.needs == n, total, nodes.needs)
    lengths = np.concatenate([length, np.zeros(total - n)])
    first, at, what = list(nodes.first), n, []
    for lane, items in enumerate(lanes):
        for stage, after, before in items:
            seconds = np.asarray(costs.gather if lane < ranks else costs.reduce)[stage]
            needs[at, 0] = total if after < 0 else after
            lengths[at] = seconds
            if before >= 0:
                extra_need[before] = at
            what.append((lane % ranks, "gather" if lane < ranks else "reduce", stage))
            at += 1
        first.append(at)
    for node, gather in extra_need.items():
        needs[node, width] = gather
    late = None if delays is None else np.pad(delays, ((0, total - n), (0, 1)))
    end = sweep(order_nodes(np.array(first), needs), lengths, late)
    start = end - lengths
    found = tuple(Collective(*w, float(start[n + k]), float(end[n + k])) for k, w in enumerate(what) if lengths[n + k] > 0)
    return start[:n], end[:n], found


Item = tuple[int, int, int]  # stage, the node after which it may start (-1: at once), the node that waits for it (-1: none)


def _uses(nodes: Nodes, rank: int, costs: Costs) -> tuple[list[Item], list[Item]]:
    low, high = int(nodes.first[rank]), int(nodes.first[rank + 1])
    held = [_stages(nodes, i) for i in range(low, high)]
    gives = [_gradients(nodes, i) for i in range(low, high)]
    gathers: list[Item] = []
    reduces: list[Item] = []
    if not costs.regather:
        seen: set[int] = set()
        for i, stages in enumerate(held, low):
            gathers += [(s, -1, i) for s in stages if s not in seen]
            seen |= set(stages)
        last = {s: i for i, stages in enumerate(gives, low) for s in stages}
        return gathers, [(s, i, -1) for s, i in sorted(last.items(), key=lambda x: x[1])]
    starts = [i for i in range(len(held)) if i == 0 or held[i] != held[i - 1]]
    runs = list(zip(starts, [*starts[1:], len(held)]))
    for k, (a, b) in enumerate(runs):
        before = held[runs[k - 1][0]] if k else ()
        release = low + runs[k - 2][1] - 1 if k >= 2 else -1
        gathers += [(s, release, low + a) for s in held[a] if s not in before]
        made = {s: low + i for i in range(a, b) for s in gives[i]}
        reduces += [(s, i, -1) for s, i in made.items()]
    return gathers, reduces


def _rows(nodes: Nodes, node: int) -> list[int]:
    return [int(r) for r in (nodes.row[node], nodes.second[node]) if r >= 0]


def _stages(nodes: Nodes, node: int) -> tuple[int, ...]:
    return tuple(sorted({int(nodes.table.stage[r]) for r in _rows(nodes, node)}))


def _gradients(nodes: Nodes, node: int) -> tuple[int, ...]:
    return tuple(int(nodes.table.stage[r]) for r in _rows(nodes, node) if nodes.table.kind[r] in (W, B))
