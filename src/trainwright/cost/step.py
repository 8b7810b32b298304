"""The time of one optimizer step for every plan of a table: a screen over columns that never exceeds the exact pass, and the exact pass.

A step is: micro-batches through the pipeline (each stage's layers, ends and exposed traffic inside them), what the data-parallel collectives show,
the optimizer, offload, and a floor. Kernels are priced in `cost.layer`, traffic in `cost.collectives` and `cost.overlap`, the span of the
pipeline in `cost.pipeline_time`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..frameworks import FRAMEWORKS
from ..frameworks.base import TimeRules
from ..schedules import SCHEDULES
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .distinct import distinct
from .kernels import Constants, constants
from .machine import constants_of
from .message import Message
from .once import offload_seconds
from .pieces import Pieces, pieces
from .pipeline_time import Stages, bound, replayed, schedule_of, stages_of
from .table import Column, PlanTable, different, merged
from .terms import Term, terms

PARTS = ("compute", "recompute", "tp_comm", "dp_comm", "pp_comm", "cp_comm", "ep_comm", "bubble", "optimizer", "offload", "other")


@dataclass(frozen=True)
class Settings:
    """Constants and framework rules that a pass uses; what ships unless a calibration says otherwise. `factor` multiplies the whole step."""

    constants: Constants = field(default_factory=constants)
    rules: Mapping[str, TimeRules] = field(default_factory=lambda: {name: f.time for name, f in FRAMEWORKS.items()})
    factor: float = 1.0

    def on(self, cluster: ClusterSpec, job: TrainingJob) -> Settings:
        """With what was measured of the cluster's GPU in place of the constants of its kind."""
        return self if cluster.gpu.measured is None else replace(self, constants=constants_of(cluster.gpu, job.precision, self.constants))


@dataclass(frozen=True)
class Origin:
    """What a time table was made from."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    table: PlanTable
    messages: Sequence[Message]
    settings: Settings


@dataclass(frozen=True)
class TimeTable:
    """Columns of seconds a step. `breakdown` (keys `PARTS`, exposed seconds only) sums to `step_s`; `message_seconds[k]` and `exposed_seconds[k]`
    belong to the k-th message; `low_s` and `high_s` are the 80 % interval. `layers` [kinds, plans] and `ends` [2, plans] stand on the rank that
    works longest, to which the breakdown belongs."""

    step_s: Column
    span: Span = field(repr=False)
    pieces: Pieces = field(repr=False)
    origin: Origin = field(repr=False)

    def __len__(self) -> int:
        return len(self.step_s)

    @cached_property
    def detailed(self) -> Pieces:
        """The pieces with their parts, which a screen leaves out until somebody asks."""
        if self.pieces.layer_parts:
            return self.pieces
        o = self.origin
        return pieces(o.model, o.cluster, o.job, o.table, o.messages, o.settings.constants, o.settings.rules)

    @cached_property
    def breakdown(self) -> dict[str, Column]:
        return _breakdown(self.detailed, self.span, self.origin.settings)

    @property
    def message_seconds(self) -> list[Column]:
        return self.detailed.message_seconds

    @property
    def exposed_seconds(self) -> list[Column]:
        return self.detailed.exposed_seconds

    @property
    def layers(self) -> NDArray[np.float64]:
        return self.span.layers

    @property
    def ends(self) -> NDArray[np.float64]:
        return self.span.ends

    @property
    def low_s(self) -> Column:
        return self.step_s * self.pieces.interval[0]

    @property
    def high_s(self) -> Column:
        return self.step_s * self.pieces.interval[1]

    def terms(self, i: int) -> list[Term]:
        """What plan i's step is made of, part by part."""
        return terms(self, i)

    def notes(self, i: int) -> list[str]:
        """What a reader should know about plan i's time: a GPU without measurements, an unsettled kind of case."""
        return list(self.pieces.notes[int(self.pieces.table.structure[i])])


@dataclass(frozen=True)
class Span:
    """Seconds of the pipeline, what stands on the rank that works longest, and what messages between stages add."""

    makespan: Column
    layers: NDArray[np.float64]  # [kinds, plans] layers of each kind on that rank
    ends: NDArray[np.float64]  # [2, plans] embedding and head
    p2p: Column


def alike(table: PlanTable) -> PlanTable:
    """The table with schedules that place stages alike and send alike as one: as many structures as a screen has to price."""
    return merged(table, _alike)


@lru_cache(maxsize=4096)
def _alike(s: Structure) -> Structure:
    """1F1B stands for all that run as it does outside of the pipeline's span."""
    if s.schedule in ("1f1b", "gpipe", "dualpipe") or s.offload == "activations-cpu":  # what offload moves is the memory's to say
        return s
    return replace(s, schedule="zb-v" if SCHEDULES[s.schedule].placement == "v" else "1f1b")


def spans_alike(table: PlanTable) -> PlanTable:
    """The table with structures whose `bound` is the same as one."""
    return merged(table, _span_alike)


@lru_cache(maxsize=4096)
def _span_alike(s: Structure) -> Structure:
    entry = SCHEDULES[s.schedule]
    kind = (entry.splits_backward, entry.placement, entry.chunks == "many")
    name = next(n for n, e in SCHEDULES.items() if (e.splits_backward, e.placement, e.chunks == "many") == kind)
    return Structure(framework=s.framework, layers_per_stage=s.layers_per_stage, schedule=name)


def screen(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    table: PlanTable,
    messages: Sequence[Message],
    settings: Settings | None = None,
) -> TimeTable:
    """Every plan over columns. Never above `exact`: the pipeline's span is a bound that no order of its actions can beat.

    `messages` may be those of ``alike(table)``.
    """
    settings = (settings or Settings()).on(cluster, job)
    p = pieces(model, cluster, job, alike(table), messages, settings.constants, settings.rules, detail=False)
    return _finish(p, bounds(model, p, table), Origin(model, cluster, job, table, messages, settings))


def bounds(model: ModelSpec, p: Pieces, table: PlanTable) -> Span:
    span = _empty(p)
    for structure, stages, rows in _groups(model, spans_alike(table)):
        _bound(p, span, structure, stages, rows)
    return span


def screen_of_parts(
    parts: Mapping[str, Column], cluster: ClusterSpec, job: TrainingJob, table: PlanTable, saved: Column, settings: Settings | None = None
) -> Column:
    """The screened step of plans with the offload that `table` says, from their `outline.screened`; `saved` bytes of a micro-batch go to the host where
    activations do. Never falls when `saved` grows."""
    settings = (settings or Settings()).on(cluster, job)
    law, m = settings.constants, table.accumulation.astype(float)
    optimizer, offload = parts["optimizer"].copy(), np.zeros(len(table))
    for structure, rows in merged(table, _offload_alone).by_structure():
        kind = structure.offload
        if kind == "none":
            continue
        owned, window = parts["owned"][rows], parts["window"][rows]
        offload[rows] = offload_seconds(kind, owned, saved[rows], window, m[rows], cluster, law)
        if kind != "activations-cpu":
            optimizer[rows] = 0.0
    inside = parts["inside"] + optimizer + offload + law["step"]["floor_s"]
    return np.asarray(inside * (1.0 + parts["jitter"]) * settings.factor)


@lru_cache(maxsize=4096)
def _offload_alone(s: Structure) -> Structure:
    return Structure(offload=s.offload)


def exact(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    table: PlanTable,
    messages: Sequence[Message],
    settings: Settings | None = None,
) -> TimeTable:
    """Every plan with its schedule replayed: uneven stages, embedding and head on the end stages, messages between stages. About 1 ms a plan."""
    settings = (settings or Settings()).on(cluster, job)
    p = pieces(model, cluster, job, table, messages, settings.constants, settings.rules)
    span = _empty(p)
    for structure, stages, rows in _groups(model, table):
        _bound(p, span, structure, stages, rows)
        if stages.stages > 1:
            _replay(p, span, structure, stages, rows, settings.rules[structure.framework].blocking_p2p)
    return _finish(p, span, Origin(model, cluster, job, table, messages, settings))


def _groups(model: ModelSpec, table: PlanTable) -> list[tuple[Structure, Stages, NDArray[np.intp]]]:
    """Plans of one structure, number of stages and of chunks share their stages."""
    found = []
    for structure, rows in table.by_structure():
        first, where = distinct((table.pp[rows], table.virtual_stages[rows]))
        order = np.argsort(where, kind="stable")
        for i, mine in zip(first, np.split(order, np.cumsum(np.bincount(where))[:-1])):
            pp, virtual = int(table.pp[rows[i]]), int(table.virtual_stages[rows[i]])
            even = FRAMEWORKS[structure.framework].even_stages
            stages = stages_of(model, pp, virtual, structure.schedule, structure.layers_per_stage, even)
            found.append((structure, stages, rows[mine]))
    return found


def _empty(p: Pieces) -> Span:
    n = len(p.table)
    return Span(np.zeros(n), np.zeros((len(p.kinds), n)), np.zeros((2, n)), np.zeros(n))


def _columns(layers: NDArray[np.float64], *ends: Column) -> NDArray[np.float64]:
    """[kinds + 2, plans]: a layer of each kind, embedding, head."""
    return np.vstack([layers, *(e[None] for e in ends)])


def _bound(p: Pieces, span: Span, structure: Structure, stages: Stages, rows: NDArray[np.intp]) -> None:
    """Fills `span` with the bound, and with what stands on the rank that sets it."""
    entry = SCHEDULES[schedule_of(structure.schedule, stages.stages // stages.pp)]
    forward = _columns(p.forward[:, rows], p.embedding[0][rows], p.head[0][rows])
    backward = _columns(p.backward[:, rows] + p.weight[:, rows], p.embedding[1][rows], p.head[1][rows])
    chunks = stages.stages // stages.pp
    unsplit = not entry.splits_backward and entry.placement == "loop"
    m = p.table.accumulation[rows].astype(float)
    span.makespan[rows], which = bound(stages, forward, backward, p.per_micro_batch[rows] / chunks, m, unsplit)
    on_rank = stages.classes[0][which].T
    span.layers[:, rows] = on_rank[:-2]
    span.ends[:, rows] = on_rank[-2:]


def _replay(p: Pieces, span: Span, structure: Structure, stages: Stages, rows: NDArray[np.intp], blocking: bool) -> None:
    """Raises the bound to the makespan of the schedule, and fills in what messages between stages add."""
    chunks = stages.stages // stages.pp
    seconds = [stages.counts @ part[:, rows] for part in (p.forward, p.backward, p.weight)]
    for part, ends in zip(seconds, (0, 1)):
        part[0] += p.embedding[ends][rows]
        part[-1] += p.head[ends][rows]
    seconds[0] += p.per_micro_batch[rows] / chunks
    for m in different(p.table.accumulation[rows]).tolist():
        at = np.flatnonzero(p.table.accumulation[rows] == m)
        here, sent = rows[at], p.p2p_s[rows[at]]
        sending = np.flatnonzero(sent)  # once more without messages, beside the rest
        f, b, w = (part[:, np.concatenate([at, at[sending]])] for part in seconds)
        found = replayed(structure.schedule, stages, m, f, b, w, np.concatenate([sent, np.zeros(len(sending))]), blocking)
        full, without = found[: len(at)], found[: len(at)].copy()
        without[sending] = found[len(at) :]
        most = 2.0 * sent * (m + stages.pp) * chunks  # every message on the critical path
        most = np.where(most > 0.003 * full, full - without, most)
        span.p2p[here] = np.maximum(0.0, np.minimum(most, full - span.makespan[here]))
        span.makespan[here] = np.maximum(full, span.makespan[here])


def _finish(p: Pieces, span: Span, origin: Origin) -> TimeTable:
    """Adds what is outside the pipeline."""
    inside = span.makespan + p.data_s + p.optimizer_s + p.offload_s + origin.settings.constants["step"]["floor_s"]
    return TimeTable(inside * (1.0 + jitter(p, origin.settings)) * origin.settings.factor, span, p, origin)


def jitter(p: Pieces, settings: Settings) -> Column:
    """Share of the step that every doubling of nodes adds: the slowest of many ranks."""
    return np.asarray(settings.constants["step"]["jitter"] * np.log2(np.maximum(p.nodes, 1.0)))


def _breakdown(p: Pieces, span: Span, settings: Settings) -> dict[str, Column]:
    """The step as the parts of the rank that works longest, and its idle time."""
    m = p.table.accumulation.astype(float)
    sums = {name: m * (span.layers * p.layer_parts[name]).sum(axis=0) for name in p.layer_parts}
    ends = m * (span.ends[0] * p.embedding.sum(axis=0) + span.ends[1] * p.head.sum(axis=0))
    busy = sum(sums.values()) + ends + m * p.per_micro_batch
    idle = span.makespan - span.p2p - busy
    outside = p.data_s + p.optimizer_s + p.offload_s + settings.constants["step"]["floor_s"]
    parts = {
        "compute": sums["compute"] + ends,
        "recompute": sums["recompute"],
        "tp_comm": sums["tp"],
        "dp_comm": p.data_s + m * p.data_per_micro_batch,
        "pp_comm": span.p2p,
        "cp_comm": sums["cp"],
        "ep_comm": sums["ep"],
        "bubble": np.where(idle > 1e-12 * span.makespan, idle, 0.0),  # the rest is rounding
        "optimizer": p.optimizer_s,
        "offload": p.offload_s,
        "other": sums["host"] + m * (p.per_micro_batch - p.data_per_micro_batch) + settings.constants["step"]["floor_s"],
    }
    parts["other"] = parts["other"] + (span.makespan + outside) * jitter(p, settings)
    return {name: parts[name] * settings.factor for name in PARTS}


__all__ = ["PARTS", "Settings", "Term", "TimeTable", "alike", "bounds", "exact", "jitter", "screen", "screen_of_parts"]
