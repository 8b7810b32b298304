"""The least that a step can take, for a whole space at once: kernels and traffic inside layers, and the pipeline's span around them.

Kernels depend on little (micro-batch, tp, cp, ep, etp, sequence parallelism, recomputation), spans on the pipeline besides; neither on how data parallelism
is split. Each is priced once for each different combination. Left out: data-parallel traffic, messages between stages; of the optimizer what the most sharded
plan pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import NUMBERS, Structure
from .distinct import distinct
from .layer import BlockTime
from .message import Message
from .pieces import Pieces, pieces
from .step import Settings, alike, bounds, jitter, spans_alike
from .table import Column, PlanTable, merged
from .traffic import inside_layers, traffic

LAYER = ("micro_batch_size", "tp", "cp", "ep", "etp")  # the numbers that a layer's kernels depend on
KEEPS = 1.0 - 1e-9  # of a second: sums in another order


def outline(
    model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, settings: Settings | None = None
) -> dict[str, Column]:
    """What `step.screen_of_parts` adds up, none above a plan's own: seconds `inside` (the pipeline) and of the `optimizer`, parameters `owned`, the `jitter` of
    many nodes; and never below it the `window` (kernels of one micro-batch) behind which activations may move.
    """
    settings = (settings or Settings()).on(cluster, job)
    piped = merged(table, _piped)
    first, of = distinct([piped.structure, *(getattr(table, n) for n in (*LAYER, "pp", "virtual_stages", "accumulation"))])
    spans = piped.take(first)
    inner = merged(spans, _inside)
    first, where = distinct([inner.structure, *(getattr(inner, n) for n in LAYER)])
    one = np.ones(len(first), dtype=np.int64)
    few = replace(inner.take(first), dp_replicate=one, dp_shard=one, pp=one, virtual_stages=one)
    p = _layers(model, cluster, job, few, settings)
    whole = _spread(p, spans, where, cluster)
    inside, each = bounds(model, whole, spans).makespan * KEEPS, where[of]
    owned = _owned_share(model, table) * KEEPS
    return {
        "inside": inside[of],
        "optimizer": p.optimizer_s[each] * owned,
        "window": p.window_s[each] * _largest_share(model, table) / KEEPS,
        "owned": p.owned[each] * owned,
        "jitter": jitter(whole, settings)[of],
    }


def screened(
    model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, settings: Settings | None = None
) -> dict[str, Column]:
    """What `step.screen_of_parts` adds up for plans that offload nothing, every term of a step among it: seconds `inside` (the pipeline and data-parallel
    traffic), of the `optimizer` and of the `window`, parameters `owned`, the `jitter` of many nodes. Plans that differ in their schedule alone are priced once
    but for the pipeline's span.
    """
    settings = (settings or Settings()).on(cluster, job)
    plain, kinds = alike(table), spans_alike(table)
    first, where = distinct([plain.structure, *(getattr(table, n) for n in NUMBERS)])  # in the order of structures: each is a slice
    few = plain.take(first)
    p = pieces(model, cluster, job, few, traffic(model, cluster, job, few), settings.constants, settings.rules, False)
    first, of = distinct([where, kinds.structure])
    spans = table.take(first)
    inside = bounds(model, _spread(p, spans, where[first], cluster), spans).makespan[of]
    return {
        "inside": inside + p.data_s[where],
        "optimizer": p.optimizer_s[where],
        "window": p.window_s[where],
        "owned": p.owned[where],
        "jitter": jitter(p, settings)[where],
    }


def _layers(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, table: PlanTable, settings: Settings) -> Pieces:
    """Pieces of plans without data parallelism and pipeline.

    What a rank sends is shared out over its layers, so what one of them shows depends on the kinds that stand beside it: where there are several, each has its
    own exchange of experts and what the kind that sends least sends, hidden behind the kind that takes longest.
    """
    made = (cluster, job, table)
    rest = (settings.constants, settings.rules, False)
    if len(model.counts) == 1:
        return pieces(model, *made, traffic(model, *made, kinds=(inside_layers,)), *rest)
    alone = [replace(model, layers=(name,) * model.num_layers) for name in dict.fromkeys(model.layers)]
    sent = [traffic(kind, *made, kinds=(inside_layers,)) for kind in alone]
    shared = [m for overlaps in (False, True) for m in _least([[m for m in own if bool(m.overlaps) == overlaps] for own in sent])]
    beside = [block for block, _ in model.counts]
    known: dict[tuple[Structure, int, bool], BlockTime] = {}
    experts = [[m for m in own if m.axis == "ep" and not m.overlaps] for own in sent]
    each = [pieces(kind, *made, [*shared, *own], *rest, beside, known) for kind, own in zip(alone, experts)]
    forward, backward, weight = (np.concatenate([getattr(p, name) for p in each]) for name in ("forward", "backward", "weight"))
    return replace(pieces(model, *made, [], *rest, known=known), forward=forward, backward=backward, weight=weight)


def _least(sent: Sequence[Sequence[Message]]) -> list[Message]:
    """What the kind of layer sends that sends least, but for the exchange of experts."""
    return min(
        ([m for m in own if m.axis != "ep"] for own in sent),
        key=lambda messages: sum(float(m.bytes_per_call @ m.calls) for m in messages),
    )


def _owned_share(model: ModelSpec, table: PlanTable) -> Column:
    """Of all parameters, what the fullest rank updates at least: the mean over ranks. With a pipeline of unlike layers or a tied table the rank with most
    parameters may update less."""
    experts = any(block.rows("grouped_linear") for block, _ in model.counts)
    plain = len(model.counts) == 1 and not model.tied and not experts
    shards = table.pp * table.dp_shard * table.cp * (table.tp if experts else 1)
    return np.where((table.pp == 1) | plain, 1.0 / shards, 0.0)


def _largest_share(model: ModelSpec, table: PlanTable) -> Column:
    """Of all layers' kernels at most so much runs on one pipeline rank; all of them where layers differ."""
    most = -(-(model.num_layers + 2) // (table.pp * table.virtual_stages)) * table.virtual_stages
    return np.minimum(most / model.num_layers, 1.0) if len(model.counts) == 1 else np.ones(len(table))


@lru_cache(maxsize=4096)
def _piped(s: Structure) -> Structure:
    """What a pipeline's span depends on, data parallelism left out."""
    return replace(s, sharding="none", offload="none")


@lru_cache(maxsize=4096)
def _inside(s: Structure) -> Structure:
    """What a layer's time depends on; the sharding that adds nothing."""
    return replace(s, schedule="1f1b", sharding="none", offload="none", layers_per_stage=None)


def _spread(p: Pieces, table: PlanTable, where: np.ndarray, cluster: ClusterSpec) -> Pieces:
    """The pieces of the combinations as those of the plans."""
    return replace(
        p,
        table=table,
        forward=p.forward[:, where],
        backward=p.backward[:, where],
        weight=p.weight[:, where],
        embedding=p.embedding[:, where],
        head=p.head[:, where],
        per_micro_batch=p.per_micro_batch[where],
        nodes=table.gpus / cluster.gpus_per_node,
    )
