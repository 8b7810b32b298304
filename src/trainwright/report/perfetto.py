"""A replayed schedule as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a process a rank, arrows for messages, counters for the activations held.

One unit of time becomes `unit_us` microseconds (default: a unit is a millisecond).
"""

from __future__ import annotations

import json

import numpy as np

from ..schedules.actions import KINDS
from ..schedules.timeline import Timeline

COLOR = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "thread_state_uninterruptible", "W": "thread_state_runnable"}
MAX_ARROWS = 100_000


def to_trace(t: Timeline, unit_us: float = 1000.0) -> str:
    """The JSON text. Arrows join each message's producer and consumer; beyond 100,000 messages only the first ones are drawn, which `metadata` says."""
    events: list[dict[str, object]] = []
    for rank in range(t.stages):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": n, "args": {"name": name}}
            for n, name in enumerate(("compute", "overlapped backward", "collectives"))
        ]
        times, held = t.memory_curve(rank)
        events += [
            {"name": "activations held", "ph": "C", "pid": rank, "ts": at * unit_us, "args": {"microbatches": h}}
            for at, h in zip(times.tolist(), held.tolist())
        ]
    events += _actions(t, unit_us)
    arrows, drawn = _arrows(t, unit_us)
    events += arrows
    events += [
        {"name": f"{c.kind} stage {c.stage}", "cat": "collective", "ph": "X", "pid": c.rank, "tid": 2, "ts": c.start * unit_us, "dur": (c.end - c.start) * unit_us}
        for c in t.collectives
    ]
    metadata = {"schedule": t.name, "makespan": t.makespan, "messages": t.messages, "arrows": drawn}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "metadata": metadata}, separators=(",", ":"))


def _actions(t: Timeline, unit_us: float) -> list[dict[str, object]]:
    table, critical = t.table, set(t.critical_path)
    second = set(t.nodes.second[t.nodes.second >= 0].tolist())
    columns = (table.rank, table.kind, table.stage, table.microbatch, t.row_start * unit_us, (t.row_end - t.row_start) * unit_us)
    out: list[dict[str, object]] = []
    for i, (rank, kind, stage, microbatch, start, length) in enumerate(zip(*(c.tolist() for c in columns))):
        letter = KINDS[kind]
        out.append(
            {
                "name": f"{stage}{letter}{microbatch}",
                "cat": letter,
                "ph": "X",
                "pid": rank,
                "tid": 1 if i in second else 0,
                "ts": start,
                "dur": length,
                "cname": COLOR[letter],
                "args": {"stage": stage, "microbatch": microbatch, "critical": i in critical},
            }
        )
    return out


def _arrows(t: Timeline, unit_us: float) -> tuple[list[dict[str, object]], int]:
    """Flow events from the end of each producer (a moment before it, so that the arrow binds to it) to the start of its consumer."""
    node, column = np.nonzero(t.nodes.remote)
    node, column = node[:MAX_ARROWS], column[:MAX_ARROWS]
    source = t.nodes.needs[node, column]
    rank = t.nodes.rank
    from_at = (t.end[source] - (t.end[source] - t.start[source]) * 0.01) * unit_us
    to_at = t.start[node] * unit_us
    out: list[dict[str, object]] = []
    for k, (a, b, begin, finish) in enumerate(zip(rank[source].tolist(), rank[node].tolist(), from_at.tolist(), to_at.tolist())):
        out.append({"name": "message", "cat": "message", "ph": "s", "id": k, "pid": a, "tid": 0, "ts": begin})
        out.append({"name": "message", "cat": "message", "ph": "f", "bp": "e", "id": k, "pid": b, "tid": 0, "ts": finish})
    return out, len(node)
