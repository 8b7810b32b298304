"""What every rank sends in a step, exactly: a list of `Message`, each a kind of collective with a column entry for every plan.

Group sizes and strides follow the order of axes from inner to outer: tp, cp, dp_shard, dp_replicate, pp; experts spread over ranks of
dp x cp x tp / etp. Payloads are whole messages, as `cost.message` says. With a pipeline they are those of the rank with the most
parameters (the first of equals), of an inner rank for what stages send each other, or of the rank that the caller names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ..message import Message
from ..table import IntColumn, PlanTable, Rows, contiguous
from .columns import Case, Stage, pipeline_stage
from .data import data_parallel
from .others import context_parallel, expert_parallel, pipeline_parallel
from .tensor import tensor_parallel

__all__ = ["KINDS", "Case", "Stage", "inside_layers", "pipeline_stage", "traffic", "worst_rank"]


def inside_layers(case: Case) -> None:
    """Messages of tensor, context and expert parallelism inside layers, without those of the ends: alike for each layer whatever the other axes are."""
    none = np.zeros(len(case.table), dtype=np.int64)
    case.stage = replace(case.stage, embedding=none, head=none)
    tensor_parallel(case)
    context_parallel(case)
    expert_parallel(case)


KINDS = (tensor_parallel, data_parallel, pipeline_parallel, context_parallel, expert_parallel)


def traffic(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    table: PlanTable,
    rank: IntColumn | None = None,
    kinds: Sequence[Callable[[Case], None]] = KINDS,
) -> list[Message]:
    """Every message of one rank and step, for all plans of the table. `rank` (a column) names the pipeline rank, default: see the module. `kinds`: those
    of some axes alone.

    Collectives of the same axis, name, phase, overlap and description are one `Message`; a plan that does not send it has 0 calls.
    """
    merged: dict[tuple[str, ...], Message] = {}
    for structure, rows in table.by_structure():
        place = contiguous(rows)
        case = Case(model, cluster, job, structure, table.take(place), None if rank is None else rank[place])
        for part in kinds:
            part(case)
        for message in _sum_alike(case.messages):
            key = _key(message)
            while key in merged and merged[key].calls[place].any():
                key = (*key, "again")
            merged[key] = _scatter(message, merged.get(key), place, len(table))
    return list(merged.values())


def worst_rank(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable) -> IntColumn:
    """The pipeline rank whose messages `traffic` lists by default, a column."""
    ranks = np.zeros(len(table), dtype=np.int64)
    for structure, rows in table.by_structure():
        ranks[rows] = pipeline_stage(Case(model, cluster, job, structure, table.take(rows))).rank
    return ranks


def _key(m: Message) -> tuple[str, ...]:
    return (m.axis, m.collective, m.phase, m.overlaps, m.what)


def _sum_alike(messages: list[Message]) -> list[Message]:
    """Messages that agree in everything but the number of calls become one."""
    found: dict[tuple[str, ...], list[Message]] = {}
    for m in messages:
        same = found.setdefault(_key(m), [])
        for i, other in enumerate(same):
            if all(np.array_equal(getattr(m, c), getattr(other, c)) for c in ("bytes_per_call", "ranks", "stride")):
                same[i] = replace(m, calls=m.calls + other.calls)
                break
        else:
            same.append(m)
    return [m for same in found.values() for m in same]


def _scatter(part: Message, into: Message | None, rows: Rows, length: int) -> Message:
    """`part` with its columns spread to `length` rows, or written into those of a message alike."""

    def column(name: str, empty: int) -> IntColumn:
        whole: IntColumn = np.full(length, empty, dtype=np.int64) if into is None else getattr(into, name)  # made here, so ours to write
        whole[rows] = getattr(part, name)
        return whole

    return replace(
        part, bytes_per_call=column("bytes_per_call", 0), calls=column("calls", 0), ranks=column("ranks", 1), stride=column("stride", 1)
    )
