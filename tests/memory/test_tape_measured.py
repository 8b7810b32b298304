"""The tape against PyTorch itself, to the byte.

`truth_memory.jsonl`: published models, one rank of a fake world; torch 2.13's real DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, checkpointing and
AdamW on fake tensors, second step. `measured_memory.jsonl`: small models under random combinations of the same features, measured in the same way by
``benchmarks/measure_phases.py`` with torch 2.13.0 and transformers 5.24.0; the peak of forward and backward, that of the optimizer step, and what is
alive between them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.cost.memory_table import MemoryTable
from trainwright.cost.table import PlanTable
from trainwright.cost.tape import can_express, memory_rows
from trainwright.resolve import resolve
from trainwright.spec.run import validate

DATA = Path(__file__).parents[1] / "data"
SLACK = 8192  # bytes: step counters, random states and other scalars
SCALARS = 256  # bytes: in the cases measured here only scalars differ


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


TRUTH = {r["id"]: r for r in rows("truth_memory.jsonl")}
MEASURED = {r["id"]: r for r in rows("measured_memory.jsonl")}


@cache
def predicted(name: str) -> MemoryTable:
    run = resolve(validate((TRUTH | MEASURED)[name]["spec"]))
    assert can_express(run.model, run.job, run.plan.structure)
    return memory_rows(run.model, run.cluster, run.job, run.plan.structure, PlanTable.from_plans([run.plan]))


@pytest.mark.parametrize("name", TRUTH)
def test_states_saved_bytes_and_peak_are_those_of_pytorch(name: str) -> None:
    found, measured = predicted(name), TRUTH[name]["measured"]
    states = {k: int(v[0]) for k, v in found.states.items()}
    pairs = {
        "parameter_bytes": states["parameters"] + states["master_weights"],
        "gradient_bytes": states["gradients"],
        "optimizer_bytes": states["optimizer"],
        "saved_bytes": int(found.saved_bytes[0]),
        "peak_bytes": int(found.peak_bytes[0]),
    }
    wrong = {k: v - measured[k] for k, v in pairs.items() if measured[k] and abs(v - measured[k]) > SLACK}
    assert not wrong
    assert PHASE[measured["peak_phase"]] == int(found.peak_phase[0])


PHASE = {"fwd": 1, "bwd": 2, "opt": 3}


@pytest.mark.parametrize("name", MEASURED)
def test_each_phase_is_that_of_pytorch(name: str) -> None:
    found, measured = predicted(name), MEASURED[name]["measured"]
    assert abs(max(int(found.phases[p][0]) for p in ("forward", "backward")) - measured["forward_backward_peak_bytes"]) <= SCALARS
    if measured["optimizer_peak_bytes"] is not None:
        assert abs(int(found.phases["optimizer"][0]) - measured["optimizer_peak_bytes"]) <= SCALARS


@pytest.mark.parametrize("name", list(MEASURED)[::7] + list(TRUTH)[::9])
def test_the_timeline_and_the_terms_tell_the_same_peak(name: str) -> None:
    """Both come from a replay of every layer, the table from a few layers and their slopes."""
    found = predicted(name)
    peak = int(found.peak_bytes[0])
    assert max(m.bytes for m in found.timeline(0)) == peak
    terms = found.terms(0)
    assert sum(t.bytes for t in terms) == peak
    by_part = {part: sum(t.bytes for t in terms if t.part == part) for part in found.breakdown}
    assert by_part == {part: int(column[0]) for part, column in found.breakdown.items()}


def test_what_is_alive_between_the_phases() -> None:
    """After forward and after backward, from the whole replay of each measured case."""
    for name, row in list(MEASURED.items())[::5]:
        step, values = predicted(name).details[0].replayed(0)  # type: ignore[attr-defined]
        for mark in ("after forward", "after backward"):
            live = step.tape.marks[mark]
            total = sum(values[k // 8] * int(live[k]) for k in np.flatnonzero(live))
            assert abs(total - row["measured"][f"{mark.replace(' ', '_')}_bytes"]) <= SCALARS, (name, mark)
