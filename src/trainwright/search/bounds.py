"""A lower bound on a plan's memory, in a few array operations: what no engine of `cost.memory` can go below.

The first pipeline rank holds, at the end of its first forward passes, the weights and optimizer states of its layers and what its layers save for backward
(`cost.memory.saved_by_layer`), for as many micro-batches as its schedule has in flight. What a framework may avoid of the rest is left out, so plans that
the bound refuses never fit, and most plans that do not fit are refused by it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cost.distinct import distinct
from ..cost.memory import on_tape, saved_by_layer
from ..cost.table import Column, PlanTable, merged
from ..frameworks import FRAMEWORKS
from ..frameworks.dtypes import dtypes
from ..schedules import SCHEDULES
from ..sharding import SHARDINGS
from ..spec.model import ModelSpec
from ..spec.optimizer import OPTIMIZERS
from ..spec.plan import Structure
from ..spec.precision import DTYPE_BYTES, activation_bytes
from .rules import Case

LOSS_COPIES = 2  # log-softmax, and its gradient


def least_device_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a card that every plan needs at least; float, one entry a plan."""
    return Bounds(case, table).least(table.structures, np.arange(len(table)))


@dataclass(frozen=True)
class Bounds:
    """The bounds of a table's plans, and of the same plans with another recomputation and offload.

    The largest of what a rank holds after its forward passes, at the loss, and once gradients exist. Most of it depends neither on the schedule nor on the
    stages: it is computed once for each of the few shapes of plans, and where a shape alone is too much for the card the rest is left out.
    """

    case: Case
    table: PlanTable

    @cached_property
    def shapes(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(a plan of each shape, the shape of each plan)."""
        return distinct([merged(self.table, _unscheduled).structure, self.table.dp, *(getattr(self.table, name) for name in SHAPE)])

    @cached_property
    def places(self) -> Places:
        return places_of(self.case, self.table)

    def least(self, structures: tuple[Structure, ...], rows: NDArray[np.intp]) -> Column:
        """Of these rows, each with the structure that stands here in place of the table's own."""
        first, shape = self.shapes
        there = np.zeros(len(first), dtype=bool)
        there[shape[rows]] = True
        shape = (np.cumsum(there) - 1)[shape[rows]]  # among those that are there
        capacity = self.case.cluster.gpu.capacity_bytes
        plans = merged(replace(self.table.take(first[there]), structures=structures), _unscheduled)
        few = Shapes.of(self.case, plans, capacity)
        found = few.least[shape]
        left = np.flatnonzero(found <= capacity)
        if len(left):
            found[left] = np.maximum(found[left], few.take(shape[left]).on(self.places.take(rows[left])))
        return found


SHAPE = ("tp", "pp", "cp", "dp_shard", "ep", "etp", "micro_batch_size", "accumulation")


@dataclass(frozen=True)
class Shapes:
    """Columns, one entry a shape of plans.

    `least`: bytes of the whole plan. `mean` layers stand on some rank. Bytes of one layer: what a rank has `owned`, what FSDP2 has `gathered` and what of it
    `stays` after the forward pass, `gradients`, `saved` for backward by each of `group` layers. Bytes of a plan: `loss`, what the `head` keeps of each that is
    in flight, a layer that is recomputed `again`, `received` from a neighbor; of all ranks' mean, states (`heaviest`) and what they save (`kept`).
    `micro_batches` of a step, 0 outside of pipelines.
    """

    least: Column
    mean: Column
    owned: Column
    gathered: Column
    stays: Column
    gradients: Column
    saved: Column
    group: Column
    loss: Column
    head: Column
    again: Column
    received: Column
    heaviest: Column
    kept: Column
    micro_batches: Column

    @classmethod
    def of(cls, case: Case, table: PlanTable, capacity: float) -> Shapes:
        """Of one plan of each shape, on any schedule; what is saved is left out where the rest is above `capacity` bytes."""
        found = cls(**{f.name: np.zeros(len(table)) for f in fields(cls)})
        found.mean[:] = case.layers / table.pp
        found.micro_batches[:] = np.where(table.pp > 1, table.accumulation, 0)
        for structure, rows in table.by_structure():
            found._fill(case, structure, table.take(rows), rows)
        several = np.where(found.micro_batches > 1, found.gathered, 0.0)
        found.least[:] = np.maximum(found.mean * (found.owned + found.gradients + several), found.heaviest)
        found._save(case, table, np.flatnonzero(found.least <= capacity))
        return found

    def _fill(self, case: Case, structure: Structure, part: PlanTable, rows: NDArray[np.intp]) -> None:
        one = np.ones(len(part))
        self.owned[rows] = states(case, structure, part, one)
        self.gathered[rows] = unsharded(case, structure, part, one)
        self.gradients[rows] = gradients(case, structure, part, one)
        self.heaviest[rows] = states(case, structure, part, one / part.pp, whole_model(case.model))
        self.stays[rows] = 0.0 if "parameters" in SHARDINGS[structure.sharding].splits else self.gathered[rows]
        self.loss[rows] = logits(case, structure, part)
        self.received[rows] = received(case, structure, part)
        self.group[rows] = group_of(structure)
        if structure.framework == "fsdp2" and structure.offload != "activations-cpu":  # log-softmax of every micro-batch in flight
            self.head[rows] = np.where(on_tape(case.model, case.job, structure, part), self.loss[rows] / LOSS_COPIES, 0.0)

    def _save(self, case: Case, table: PlanTable, rows: NDArray[np.intp]) -> None:
        """What layers save for backward, of these rows."""
        stay = np.array([s.offload != "activations-cpu" for s in table.structures], dtype=bool)
        rows = rows[stay[table.structure[rows]]]
        if not len(rows):
            return
        part = table.take(rows)
        each = saved_by_layer(case.model, case.cluster, case.job, part)
        count = np.array([n for _, n in case.model.counts], dtype=float)
        self.saved[rows], self.again[rows] = each.min(axis=0), recomputed(case, part)
        self.kept[rows] = np.where(self.group[rows] == 1, count @ each / part.pp, 0.0)  # where each layer is a group
        self.least[:] = np.maximum(self.least, self._in_flight(1.0))

    def _in_flight(self, flying: Column | float) -> Column:
        """What some rank, and the mean of all, needs for so many micro-batches."""
        some = self.mean * self.owned + self.saved * np.floor(np.ceil(self.mean) / self.group) * flying
        return np.maximum(some, self.heaviest + self.kept * flying)

    def take(self, rows: NDArray[np.intp]) -> Shapes:
        return Shapes(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def on(self, place: Places) -> Column:
        """What ranks need when their forward passes end, and when a backward pass does; entries are plans now."""
        layers, flying, several = place.layers, place.flying, self.micro_batches > 1
        one, kept = self.saved * np.floor(layers / self.group), np.where(self.saved > 0, self.head, 0.0)
        before = np.maximum(np.where(self.micro_batches == 0, self.loss, 0.0), self.again)
        first = layers * (self.owned + self.stays) + one * flying + kept * place.losses + before
        ends = layers * (self.owned + self.gradients)
        # where every micro-batch of the step is in flight there are no gradients yet
        fewer, less = flying - (flying >= self.micro_batches), place.losses - (place.losses >= self.micro_batches) * place.head
        inside = np.where(several, layers * self.gathered + one * fewer + kept * less + self.again, 0.0)
        last = np.where(several & place.head, self.loss + layers * self.stays, 0.0)
        most = np.maximum(first, ends + np.maximum(inside, last)) + self.received * place.neighbors
        return np.maximum(np.where(place.there, most, 0.0).max(axis=0), self._in_flight(np.minimum(flying[0], flying[-1])))


@lru_cache(maxsize=4096)
def _unscheduled(s: Structure) -> Structure:
    return replace(s, schedule="1f1b")


@lru_cache(maxsize=4096)
def _schedule_alone(s: Structure) -> Structure:
    return Structure(schedule=s.schedule)


@dataclass(frozen=True)
class Places:
    """Ranks of each plan's pipeline, [ranks, plans], at least: `layers` that stand there, micro-batches `flying` whose activations it holds at once (in units
    of all of its layers; 1 where no closed form is known) and `losses` that it does, `neighbors` that send to it, whether it has the head, and whether a plan
    has such a rank at all."""

    layers: NDArray[np.float64]
    flying: NDArray[np.float64]
    losses: NDArray[np.float64]
    neighbors: NDArray[np.float64]
    head: NDArray[np.bool_]
    there: NDArray[np.bool_]

    def take(self, rows: NDArray[np.intp]) -> Places:
        return Places(*(getattr(self, f.name)[:, rows] for f in fields(self)))


RANKS = np.array([[0], [1], [-1]])  # the first, the second where it is no end, the last
FIRST, LAST = RANKS == 0, RANKS < 0


def places_of(case: Case, table: PlanTable) -> Places:
    """The first, the second and the last rank."""
    loop = np.array([SCHEDULES[s.schedule].placement == "loop" for s in table.structures], dtype=bool)[table.structure]
    given = np.array([s.layers_per_stage is not None for s in table.structures], dtype=bool)[table.structure]
    chunk, larger = np.divmod(case.layers + 2, table.pp * table.virtual_stages)
    more = np.where(FIRST, -(-larger // table.pp), larger // table.pp)  # stages one layer larger come first
    slots = chunk * table.virtual_stages + np.where(loop, more - (FIRST | LAST), -2)  # the ends take one each
    layers = np.where(table.pp == 1, case.layers, np.maximum(slots, 0))
    flying, losses = in_flight(table)
    head = np.where(LAST, loop, FIRST & ~loop)
    return Places(
        np.where(given, 0, layers).astype(float),
        flying,
        losses * head,
        np.where(table.pp > 1, 2.0 * table.virtual_stages - np.where(loop, FIRST | LAST, 2), 0.0),
        head,
        FIRST | (loop & (table.pp >= np.where(LAST, 2, 3))),
    )


def received(case: Case, structure: Structure, table: PlanTable) -> Column:
    """torch.distributed.pipelining allocates what a stage receives from a neighbor for all micro-batches of a step."""
    if structure.framework != "fsdp2":
        return np.zeros(len(table))
    split = table.tp if structure.sequence_parallel else 1
    tokens = table.accumulation * table.micro_batch_size * np.floor(case.job.seq_len / (table.cp * split))
    return np.where(table.pp > 1, tokens * case.model.hidden * activation_bytes(case.job.precision), 0.0)


def least_moved_bytes(case: Case, table: PlanTable) -> Column:
    """Bytes of a micro-batch that activation offload moves to the host, at least; 0 for other plans."""
    found = np.zeros(len(table))
    moved = np.array([s.offload == "activations-cpu" for s in table.structures], dtype=bool)[table.structure]
    if not moved.any():
        return found
    some = np.flatnonzero(moved)
    found[some] = saved_by_layer(case.model, case.cluster, case.job, table.take(some)).min(axis=0)
    fewest = places_of(case, table).layers[-1]  # no rank has fewer, the one whose memory counts neither
    for structure, rows in table.by_structure():
        if structure.offload == "activations-cpu":
            found[rows] *= np.floor(fewest[rows] / group_of(structure))
    return found


def group_of(structure: Structure) -> int:
    """Layers that are kept or recomputed together."""
    return max(structure.recompute_every, 1) if structure.recompute == "full" else 1


@lru_cache(maxsize=256)
def smallest_layer(model: ModelSpec) -> tuple[int, int]:
    """Parameters of the smallest kind of layer: outside of experts, of experts."""
    blocks = [block for block, _ in model.counts]
    dense = min((sum(op.parameters for op in block if op.kind != "grouped_linear") for block in blocks), default=0)
    return dense, min((sum(op.parameters for op in block.rows("grouped_linear")) for block in blocks), default=0)


def whole_model(model: ModelSpec) -> tuple[int, int]:
    """Parameters of all layers: outside of experts, of experts."""
    experts = sum(sum(op.parameters for op in block.rows("grouped_linear")) * n for block, n in model.counts)
    return sum(block.parameters * n for block, n in model.counts) - experts, experts


def states(case: Case, structure: Structure, table: PlanTable, layers: Column, parameters: tuple[int, int] | None = None) -> Column:
    """Weights and optimizer states of the layers, sharded as far as anybody shards them. `parameters`: of a layer outside of experts and of experts, those of
    the smallest kind of layer where nothing is said."""
    job, splits = case.job, SHARDINGS[structure.sharding].splits
    if structure.offload.startswith("params"):
        return np.zeros(len(table))
    shards = np.maximum(table.dp_shard * table.cp, 1)
    dense, experts = parameters or smallest_layer(case.model)
    if job.method == "qlora":
        return np.zeros(len(table))
    weight: Column | float = activation_bytes(job.precision) if job.method == "full" or job.precision != "fp32" else 2
    one_copy = _one_copy(case, structure, table)
    weight = np.where(one_copy, 4.0, weight)  # the shards; gathered copies are left out
    if one_copy.any() and structure.sharding != "none":
        splits = {**splits, "parameters": "dp_shard"}
    optimizer = OPTIMIZERS[job.optimizer]
    kept = 0.0
    if job.method == "full" and not structure.offload.startswith("optimizer") and not optimizer.pageable and not optimizer.factored:
        copies = min(optimizer.copies, optimizer.copies if optimizer.matrix_copies is None else optimizer.matrix_copies)
        wide = job.master_weights == "fp32" or job.precision == "fp32"
        kept = copies * (optimizer.bytes_per_element or (4 if wide else 2))
    each = weight / (shards if "parameters" in splits else 1) + kept / (shards if "optimizer" in splits else 1)
    owned = layers * dense / table.tp * each
    if experts:
        # experts are sharded over what is left of data parallelism besides ep, at most over all of it
        owned = owned + layers * experts / (table.ep * table.etp) * (weight + kept) / np.maximum(shards, table.dp * table.cp * table.tp)
    return owned


def gradients(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Gradients of a rank's dense layers when a backward pass ends: shards where they are split, whole where nobody reduces before the end of the step.

    FSDP2 under pipeline stages adds up whole gradients, in the type of its reduction, until the last micro-batch.
    """
    job = case.job
    if job.method != "full" or job.optimizer_in_backward:
        return np.zeros(len(table))
    dense, _ = smallest_layer(case.model)
    splits = SHARDINGS[structure.sharding].splits
    shards = np.maximum(table.dp_shard * table.cp, 1) if "gradients" in splits else np.ones(len(table))
    moved = structure.offload.startswith(("optimizer", "params"))
    each = (0 if moved else min(activation_bytes(job.precision), DTYPE_BYTES[job.gradient_dtype])) / shards
    if "gradients" in splits or not structure.offload.startswith("params"):
        kept = (table.pp > 1) & (table.accumulation > 1) & _one_copy(case, structure, table)
        each = np.maximum(each, np.where(kept, DTYPE_BYTES[job.gradient_dtype], 0))
    return layers * dense / table.tp * each


def unsharded(case: Case, structure: Structure, table: PlanTable, layers: Column) -> Column:
    """Parameters of a rank's dense layers as FSDP2 gathers them. ZeRO-2 keeps them from the forward pass on; a pipeline stage keeps what a backward
    pass gathered, except of the last one (torch/distributed/pipelining/stage.py)."""
    dense, _ = smallest_layer(case.model)
    each = 1 if structure.fp8_params else activation_bytes(case.job.precision)
    return _one_copy(case, structure, table) * layers * dense / table.tp * each


def _one_copy(case: Case, structure: Structure, table: PlanTable) -> NDArray[np.bool_]:
    """Where FSDP2 wraps with mixed precision: parameters are fp32, without masters beside them. A rank alone that shards nothing is not wrapped."""
    job, framework = case.job, FRAMEWORKS[structure.framework]
    alone = table.dp * table.cp == 1
    each = [
        structure.framework == "fsdp2" and job.method == "full" and dtypes(framework, job, structure, alone=a).mixed for a in (False, True)
    ]
    return np.where(alone, each[1], each[0])


def logits(case: Case, structure: Structure, table: PlanTable) -> Column:
    """Logits of a micro-batch in fp32 on the rank with the loss; PyTorch's own loss has log-softmax and its gradient together."""
    if case.job.loss not in ("plain", "vocab-parallel") or structure.compile:
        return np.zeros(len(table))
    copies = LOSS_COPIES if structure.framework == "fsdp2" and case.job.loss == "plain" else 1
    gathered = case.job.loss == "plain" and structure.framework not in ("megatron", "deepspeed")
    return 4.0 * copies * table.micro_batch_size * case.job.seq_len / table.cp * case.model.vocab / (1 if gathered else table.tp)


def recomputed(case: Case, table: PlanTable) -> Column:
    """What one layer saves, which is there again when backward reaches it."""
    again = np.array([s.recompute == "full" and not s.compile for s in table.structures], dtype=bool)[table.structure]
    found = np.zeros(len(table))
    if again.any():
        rows = np.flatnonzero(again)
        plain = tuple(replace(s, recompute="none", recompute_every=1) for s in table.structures)
        found[rows] = saved_by_layer(case.model, case.cluster, case.job, replace(table, structures=plain).take(rows)).min(axis=0)
    return found


def in_flight(table: PlanTable) -> tuple[NDArray[np.float64], Column]:
    """[`RANKS`, plans] micro-batches whose activations a rank holds at once, at least, in units of all of its layers, and how many losses are held where
    the head stands; 1 where no closed form is known."""
    found, losses = np.ones((len(RANKS), len(table))), np.ones(len(table))
    for structure, rows in merged(table, _schedule_alone).by_structure():
        schedule, pp, m = SCHEDULES[structure.schedule], table.pp[rows], table.accumulation[rows]
        if schedule.in_flight is None or not (pp > 1).any():
            continue
        flying = schedule.in_flight(pp, m, table.virtual_stages[rows], np.where(LAST, pp - 1, np.minimum(RANKS, pp - 1)))
        found[:, rows] = np.where(pp > 1, np.maximum(flying, 1.0), 1.0)
        if schedule.ends is not None:
            losses[rows] = np.where(pp > 1, schedule.ends(pp, m, table.virtual_stages[rows])[2], 1.0)
    return found, losses
