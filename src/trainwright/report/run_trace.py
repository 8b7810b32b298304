"""A run's measured steps and the plan's predicted one in a single Perfetto trace: a process a rank each, predicted above measured, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedules.replay import schedule
from .perfetto import to_trace

if TYPE_CHECKING:
    from ..cost.estimate import Estimate

MEASURED = 1000  # process numbers of measured ranks begin here
KEPT = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_user_annotation", "cuda_runtime")


def predicted_events(estimate: Estimate) -> list[dict[str, Any]]:
    """One step: a pipeline's replayed schedule stretched to the predicted seconds, else the terms of the step time one after the other (exposed seconds)."""
    plan = estimate.plan
    if plan.pp > 1:
        timeline = schedule(plan.structure.schedule, plan.pp, plan.accumulation, plan.virtual_stages)
        found = json.loads(to_trace(timeline, estimate.step_s * 1e6 / timeline.makespan))["traceEvents"]
        for event in found:
            if event["name"] == "process_name":
                event["args"]["name"] = f"predicted {event['args']['name']}"
        return list(found)
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "predicted, every rank"}}]
    at = 0.0
    for name, seconds in estimate.to_dict()["time"]["breakdown"].items():
        if seconds:
            events.append({"name": name, "cat": "predicted", "ph": "X", "pid": 0, "tid": 0, "ts": at * 1e6, "dur": seconds * 1e6})
            at += seconds
    return events


def measured_events(folder: Path) -> list[dict[str, Any]]:
    """What torch.profiler wrote of each rank, its first event at 0."""
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank-*.json")):
        rank = int(path.stem.removeprefix("rank-"))
        found = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X" and e.get("cat") in KEPT]
        start = min((e["ts"] for e in found), default=0.0)
        lanes = {lane: n for n, lane in enumerate(dict.fromkeys(str(e["tid"]) for e in found))}
        events.append({"name": "process_name", "ph": "M", "pid": MEASURED + rank, "args": {"name": f"measured rank {rank}"}})
        for e in found:
            row = {"name": e["name"], "cat": e["cat"], "ph": "X", "pid": MEASURED + rank, "tid": lanes[str(e["tid"])]}
            events.append({**row, "ts": e["ts"] - start, "dur": e["dur"]})
    return events


def write_run_trace(folder: Path, estimate: Estimate) -> Path | None:
    """``traces/trace.json`` of a run's folder; None where no rank wrote a profile (a run of fewer than three steps)."""
    measured = measured_events(folder / "traces")
    if not measured:
        return None
    target = folder / "traces" / "trace.json"
    metadata = {"predicted_step_s": estimate.step_s, "predicted_for": estimate.cluster.gpu.id}
    document = {"traceEvents": [*predicted_events(estimate), *measured], "displayTimeUnit": "ms", "metadata": metadata}
    target.write_text(json.dumps(document) + "\n")
    return target
