"""A lower bound on a plan's memory, in a few array operations: what no engine of `cost.memory` can go below.

The first pipeline rank holds, at the end of its first forward passes, the weights and optimizer states of its layers and what its layers save for backward
(`cost.memory.saved_by_layer`), for as many micro-batches as its schedule has in flight. What a framework may avoid of the rest is left out, so plans that
the bound refuses never fit, and most plans that do not fit are refused by it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
    """Bytes of a card that every plan needs at least; float, one entry a plan.

    The largest of what a rank holds after its forward passes, at the loss, and once gradients exist. Where weights and gradients alone are too much for
    the card, activations are left out.
    """
    places = places_of(case, table)
    found = _least(case, table, places.first, None)
    rows = np.flatnonzero(found <= case.cluster.gpu.capacity_bytes)
    if len(rows):
        part = table.take(rows)
        kept = saved_by_layer(case.model, case.cluster, case.job, part)
        found[rows] = _least(case, part, places.take(rows), (kept, recomputed(case, part)))
    return found


def _least(case: Case, table: PlanTable, places: Places, kept: tuple[NDArray[np.float64], Column] | None) -> Column:
    """`least_device_bytes` of these places; `kept`: what layers of each kind save between forward and backward, and what one saves while it is recomputed."""
    found = np.zeros(len(table))
    count = np.array([n for _, n in case.model.counts], dtype=float)
    for structure, rows in merged(table, _unscheduled).by_structure():
        part = table.take(rows)
        mean = case.layers / part.pp  # some rank has so many layers
        fullest = states(case, structure, part, mean)
        heaviest = states(case, structure, part, 1 / part.pp, whole_model(case.model))  # of a rank, on average
        several = (part.pp > 1) & (part.accumulation > 1)
        later = fullest + gradients(case, structure, part, mean) + np.where(several, unsharded(case, structure, part, mean), 0.0)
        found[rows] = np.maximum(later, heaviest)
        each, again = np.zeros((len(count), len(rows))), np.zeros(len(rows))
        if kept is not None and structure.offload != "activations-cpu":
            each, again = kept[0][:, rows], kept[1][rows]
        saved: Column = each.min(axis=0)
        found[rows] = np.maximum(found[rows], _of_ranks(case, structure, part, places.take(rows), saved, again).max(axis=0))
        if kept is not None:
            flying = np.minimum(places.flying[0], places.flying[-1])[rows]
            found[rows] = np.maximum(found[rows], fullest + saved * groups(structure, np.ceil(mean)) * flying)
            # the mean over ranks, where each layer is a group
            alone = structure.recompute != "full" or structure.recompute_every <= 1
            found[rows] = np.maximum(found[rows], heaviest + alone * (count @ each) / part.pp * flying)
    return found


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

    @property
    def first(self) -> Places:
        """The first rank alone."""
        return Places(*(getattr(self, f.name)[:1] for f in fields(self)))


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
        np.where(loop & (table.pp > 1), np.where(FIRST | LAST, 1.0, 2.0), 0.0),
        head,
        FIRST | (loop & (table.pp >= np.where(LAST, 2, 3))),
    )


def _of_ranks(case: Case, structure: Structure, part: PlanTable, place: Places, saved: Column, again: Column) -> NDArray[np.float64]:
    """What ranks need when their forward passes end, and when a backward pass does. `saved`: bytes of a layer; `again`: of a layer that is recomputed."""
    layers, flying = place.layers, place.flying
    owned, gathered = states(case, structure, part, layers), unsharded(case, structure, part, layers)
    whole, loss = gradients(case, structure, part, layers), logits(case, structure, part)
    one = saved * groups(structure, layers)
    several = (part.pp > 1) & (part.accumulation > 1)
    kept: Column | float = 0.0
    if structure.framework == "fsdp2" and saved.any():  # log-softmax of every micro-batch whose loss is in flight
        kept = np.where(on_tape(case.model, case.job, structure, part), loss / LOSS_COPIES, 0.0)
    stays = np.zeros(len(part)) if "parameters" in SHARDINGS[structure.sharding].splits else gathered
    first = owned + stays + one * flying + kept * place.losses + np.maximum(np.where(part.pp == 1, loss, 0.0), again)
    # where every micro-batch of the step is in flight there are no gradients yet
    fewer, less = flying - (flying >= part.accumulation), place.losses - (place.losses >= part.accumulation) * place.head
    inside = owned + whole + np.where(several, gathered + one * fewer + kept * less + again, 0.0)
    last = owned + whole + np.where(several & place.head, loss + stays, 0.0)
    return np.where(place.there, np.max([first, inside, last], axis=0) + received(case, structure, part) * place.neighbors, 0.0)


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
            found[rows] *= groups(structure, fewest[rows])
    return found


def groups(structure: Structure, layers: Column) -> Column:
    """Whole layers, or with full recomputation whole groups of them that are recomputed together."""
    return np.floor(layers / (max(structure.recompute_every, 1) if structure.recompute == "full" else 1))


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
