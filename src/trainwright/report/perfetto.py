"""A replayed schedule as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a process a rank, arrows for messages, counters for the
activations held.

One unit of time becomes `unit_us` microseconds (default: a unit is a millisecond). Events are written as text, column by column: a quarter of a
million take about two seconds.
"""

from __future__ import annotations

import json

import numpy as np

from ..schedules.actions import KINDS
from ..schedules.timeline import Timeline

COLOR = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "thread_state_uninterruptible", "W": "thread_state_runnable"}
LANES = ("compute", "overlapped backward", "collectives")
MAX_ARROWS = 50_000
MAX_COUNTS = 1_000


def to_trace(t: Timeline, unit_us: float = 1000.0) -> str:
    """The JSON text. Arrows join each message's producer and consumer; beyond 50,000 messages only the first ones are drawn, which `metadata` says."""
    arrows, drawn = _arrows(t, unit_us)
    events = [*_names(t), *_counters(t, unit_us), *_actions(t, unit_us), *arrows]
    events += [
        f'{{"name":"{c.kind} stage {c.stage}","cat":"collective","ph":"X","pid":{c.rank},"tid":2,'
        f'"ts":{c.start * unit_us:.3f},"dur":{(c.end - c.start) * unit_us:.3f}}}'
        for c in t.collectives
    ]
    metadata = {"schedule": t.name, "makespan": t.makespan, "messages": t.messages, "arrows": drawn}
    body = ",\n".join(events)
    return f'{{"traceEvents":[\n{body}\n],"displayTimeUnit":"ms","metadata":{json.dumps(metadata)}}}\n'


def _names(t: Timeline) -> list[str]:
    lanes = [0] + ([1] if (t.nodes.second >= 0).any() else []) + ([2] if t.collectives else [])
    out = []
    for rank in range(t.stages):
        out.append(f'{{"name":"process_name","ph":"M","pid":{rank},"args":{{"name":"rank {rank}"}}}}')
        out.append(f'{{"name":"process_sort_index","ph":"M","pid":{rank},"args":{{"sort_index":{rank}}}}}')
        out += [f'{{"name":"thread_name","ph":"M","pid":{rank},"tid":{n},"args":{{"name":"{LANES[n]}"}}}}' for n in lanes]
    return out


def _counters(t: Timeline, unit_us: float) -> list[str]:
    """The activations held, at most `MAX_COUNTS` points a rank: of each stretch of the curve, its highest point."""
    out = []
    for rank in range(t.stages):
        times, held = t.memory_curve(rank)
        starts = np.unique(np.linspace(0, len(times), min(len(times), MAX_COUNTS) + 1).astype(int)[:-1])
        highest = np.maximum.reduceat(held, starts)
        highest[-1] = held[-1]
        out += [
            f'{{"name":"activations held","ph":"C","pid":{rank},"ts":{at * unit_us:.3f},"args":{{"microbatches":{h:.6g}}}}}'
            for at, h in zip(times[starts].tolist(), highest.tolist())
        ]
    return out


def _actions(t: Timeline, unit_us: float) -> list[str]:
    table = t.table
    lane = np.zeros(len(table), int)
    lane[t.nodes.second[t.nodes.second >= 0]] = 1
    critical = np.zeros(len(table), bool)
    critical[t.critical_path] = True
    mark = ',"critical":true'
    head = {code: f'","cat":"{k}","ph":"X","cname":"{COLOR[k]}","pid":' for code, k in enumerate(KINDS)}
    columns = (
        table.rank,
        table.kind,
        table.stage,
        table.microbatch,
        lane,
        critical,
        t.row_start * unit_us,
        (t.row_end - t.row_start) * unit_us,
    )
    return [
        f'{{"name":"{stage}{KINDS[kind]}{n}{head[kind]}{rank},"tid":{tid},"ts":{start:.3f},"dur":{length:.3f}'
        f',"args":{{"stage":{stage},"microbatch":{n}{mark if on else ""}}}}}'
        for rank, kind, stage, n, tid, on, start, length in zip(*(c.tolist() for c in columns))
    ]


def _arrows(t: Timeline, unit_us: float) -> tuple[list[str], int]:
    """Flow events from just before the end of each producer (so that the arrow binds to it) to the start of its consumer."""
    node, column = np.nonzero(t.nodes.remote)
    node, column = node[:MAX_ARROWS], column[:MAX_ARROWS]
    source, rank = t.nodes.needs[node, column], t.nodes.rank
    begin = (t.end[source] - (t.end[source] - t.start[source]) * 0.01) * unit_us
    columns = (rank[source], rank[node], begin, t.start[node] * unit_us)
    out = []
    for k, (a, b, leave, arrive) in enumerate(zip(*(c.tolist() for c in columns))):
        out.append(f'{{"name":"message","cat":"message","ph":"s","id":{k},"pid":{a},"tid":0,"ts":{leave:.3f}}}')
        out.append(f'{{"name":"message","cat":"message","ph":"f","bp":"e","id":{k},"pid":{b},"tid":0,"ts":{arrive:.3f}}}')
    return out, len(node)
