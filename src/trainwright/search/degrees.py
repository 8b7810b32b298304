"""Masks and sentences about degrees: what divides what, and pipelines. Listed as rules in `trainwright.search.constraints`."""

from __future__ import annotations

import numpy as np

from ..cost.stages import layers_per_stage
from ..cost.table import IntColumn, PlanTable
from ..errors import SpecError
from ..schedules import SCHEDULES
from ..spec.plan import ParallelPlan, Structure
from .rules import Case, Mask

SHOWN = 32  # stages whose layers a sentence lists
AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def every(table: PlanTable, value: bool) -> Mask:
    """The same answer for all rows."""
    return np.full(len(table), value)


def divides(column: IntColumn, totals: tuple[int, ...]) -> Mask:
    good = np.ones(len(column), dtype=bool)
    for total in totals:
        good &= total % column == 0
    return good


def listed(numbers: tuple[int, ...]) -> str:
    return " and ".join(f"{n:,}" for n in numbers)


# --- degrees and the model -----------------------------------------------------------------------------------------------------------


def gpus(case: Case, s: Structure, t: PlanTable) -> Mask:
    return t.gpus == case.cluster.gpus


def gpus_says(case: Case, p: ParallelPlan) -> str:
    return f"dp {p.dp} x tp {p.tp} x pp {p.pp} x cp {p.cp} = {p.gpus:,}, but the cluster has {case.cluster.gpus:,} GPUs"


def axes(case: Case, s: Structure, t: PlanTable) -> Mask:
    offered = case.framework(s).axes
    good = np.ones(len(t), dtype=bool)
    for axis in AXES:
        if axis not in offered:
            good &= getattr(t, axis) == 1
    return good


def axes_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    wrong = [f"{a} = {getattr(p, a)}" for a in AXES if a not in framework.axes and getattr(p, a) > 1]
    return f"{framework.title} has no axis for {' and '.join(wrong)}; it offers {', '.join(framework.axes)}"


def tp_heads(case: Case, s: Structure, t: PlanTable) -> Mask:
    return divides(t.tp, case.heads)


def kv(case: Case, s: Structure, t: PlanTable) -> Mask:
    good = np.ones(len(t), dtype=bool)
    for heads in case.kv_heads:
        fits = heads % t.tp == 0
        good &= fits | (t.tp % heads == 0) if case.framework(s).replicates_kv_heads else fits
    return good


def kv_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    also = "nor a multiple of them" if framework.replicates_kv_heads else f"and {framework.title} does not replicate them"
    return f"tp {p.tp} does not divide {listed(case.kv_heads)} key-value heads, {also}"


def etp_dense(case: Case, s: Structure, t: PlanTable) -> Mask:
    return divides(t.etp, case.expert_widths) if case.experts else t.etp == 1


def etp_says(case: Case, p: ParallelPlan) -> str:
    if not case.experts:
        return f"etp {p.etp} splits experts, and the model has none"
    return f"etp {p.etp} does not divide the experts' width {listed(case.expert_widths)}"


def ep_experts(case: Case, s: Structure, t: PlanTable) -> Mask:
    return divides(t.ep, case.experts) if case.experts else t.ep == 1


def ep_says(case: Case, p: ParallelPlan) -> str:
    if not case.experts:
        return f"ep {p.ep} spreads experts, and the model has none"
    return f"ep {p.ep} does not divide {listed(case.experts)} experts"


def ep_ranks(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.dp * t.cp * t.tp) % (t.ep * t.etp) == 0


def ep_ranks_says(case: Case, p: ParallelPlan) -> str:
    return f"ep {p.ep} x etp {p.etp} does not divide dp {p.dp} x cp {p.cp} x tp {p.tp} = {p.dp * p.cp * p.tp}, whose ranks hold the experts"


def cp(case: Case, s: Structure, t: PlanTable) -> Mask:
    seq = case.job.seq_len
    if s.cp_kind == "ulysses":
        good = seq % t.cp == 0
        for heads in case.heads:
            good &= (heads % t.tp != 0) | (heads // t.tp % t.cp == 0)
    else:
        good = seq % (2 * t.cp) == 0
    return good | (t.cp == 1)


def cp_says(case: Case, p: ParallelPlan) -> str:
    seq = case.job.seq_len
    if p.structure.cp_kind == "ulysses":
        return f"ulysses spreads heads: cp {p.cp} does not divide sequence length {seq:,} and {listed(case.heads)} heads / tp {p.tp}"
    return f"{p.structure.cp_kind} context parallelism gives a rank two pieces: 2 x cp {p.cp} does not divide sequence length {seq:,}"


def sp_sequence(case: Case, s: Structure, t: PlanTable) -> Mask:
    if not s.sequence_parallel:
        return every(t, True)
    return case.job.seq_len % (t.cp * t.tp) == 0


def sp_says(case: Case, p: ParallelPlan) -> str:
    return f"sequence parallelism splits the sequence: cp {p.cp} x tp {p.tp} does not divide sequence length {case.job.seq_len:,}"


# --- pipeline ------------------------------------------------------------------------------------------------------------------------


def stages(case: Case, s: Structure, t: PlanTable) -> Mask:
    stages = t.pp * t.virtual_stages
    return (stages == 1) | (stages <= case.layers + 2) | (s.layers_per_stage is not None)


def stages_says(case: Case, p: ParallelPlan) -> str:
    stages = p.pp * p.virtual_stages
    return f"pp {p.pp} x virtual_stages {p.virtual_stages} = {stages} stages are more than {case.layers} layers, embedding and head ({case.layers + 2} slots)"


def dealt(case: Case, s: Structure, t: PlanTable) -> Mask:
    given = s.layers_per_stage
    return np.full(len(t), True) if given is None else (t.pp * t.virtual_stages == len(given)) & (sum(given) == case.layers)


def dealt_says(case: Case, p: ParallelPlan) -> str:
    given, stages = p.structure.layers_per_stage or (), p.pp * p.virtual_stages
    even = case.framework(p.structure).even_stages
    legal = f" (nearest: {layers_per_stage(case.layers, stages, None, even)})" if stages <= min(case.layers + 2, SHOWN) else ""
    return f"deals {sum(given)} layers over {len(given)} stages; the model has {case.layers} and the plan {stages}{legal}"


def virtual(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.virtual_stages == 1) | (t.pp > 1)


def virtual_says(case: Case, p: ParallelPlan) -> str:
    return f"{p.virtual_stages} virtual stages need a pipeline, and pp is 1"


def schedule_framework(case: Case, s: Structure, t: PlanTable) -> Mask:
    framework = case.framework(s)
    return (t.pp == 1) | framework.runs_lists | (s.schedule in framework.schedules)


def schedule_says(case: Case, p: ParallelPlan) -> str:
    framework = case.framework(p.structure)
    return f"{framework.title} does not run the schedule {p.structure.schedule}; it runs {', '.join(framework.schedules) or 'no pipeline'}"


def _order_error(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> SpecError | None:
    try:
        SCHEDULES[schedule].check(pp, microbatches, virtual_stages)
    except SpecError as error:
        return error
    return None


def order(case: Case, s: Structure, t: PlanTable) -> Mask:
    """Asks the schedule itself, once for each distinct (pp, micro-batches, virtual stages)."""
    good = np.ones(len(t), dtype=bool)
    rows = np.flatnonzero(t.pp > 1)
    if not len(rows) or s.schedule not in SCHEDULES:
        return good
    columns = t.pp[rows], t.accumulation[rows], t.virtual_stages[rows]
    pp, m, v = (int(c.max()) + 1 for c in columns)
    distinct, back = np.unique(np.ravel_multi_index(columns, (pp, m, v)), return_inverse=True)
    triples = zip(*(c.tolist() for c in np.unravel_index(distinct, (pp, m, v))), strict=True)
    can = np.array([_order_error(s.schedule, *triple) is None for triple in triples])
    good[rows] = can[back.reshape(-1)]
    return good


def order_says(case: Case, p: ParallelPlan) -> str:
    error = _order_error(p.structure.schedule, p.pp, p.accumulation, p.virtual_stages)
    return error.message if error else f"{p.structure.schedule} has an order for {p.pp} stages and {p.accumulation} micro-batches"


def _largest_stage(case: Case, s: Structure, t: PlanTable, virtual_stages: IntColumn) -> IntColumn:
    """Slots of the largest stage as `cost.stages` deals them; without the ends where the framework deals layers alone and they divide."""
    stages = t.pp * np.maximum(virtual_stages, 1)
    slots = -(-(case.layers + 2) // stages)
    return np.where(case.layers % stages == 0, case.layers // stages, slots) if case.framework(s).even_stages else slots


def smaller_stages(case: Case, s: Structure, t: PlanTable) -> Mask:
    """The ramp of an interleaved schedule is the time of its first, largest chunk: more chunks of that size only add messages."""
    if s.layers_per_stage is not None:
        return every(t, True)
    v = t.virtual_stages
    return (v <= 2) | (_largest_stage(case, s, t, v) < _largest_stage(case, s, t, v - 1))


def smaller_stages_says(case: Case, p: ParallelPlan) -> str:
    row = PlanTable.from_plans([p])
    largest = int(_largest_stage(case, p.structure, row, row.virtual_stages)[0])
    return f"{p.virtual_stages} virtual stages of pp {p.pp} leave {largest} or more in the largest stage, as {p.virtual_stages - 1} do"


def filled(case: Case, s: Structure, t: PlanTable) -> Mask:
    return (t.pp == 1) | (t.accumulation >= t.pp)


def filled_says(case: Case, p: ParallelPlan) -> str:
    return f"{p.accumulation} micro-batches never keep {p.pp} pipeline ranks busy at the same time"
