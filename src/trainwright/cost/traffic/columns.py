"""What the messages are made of: the plans of one structure as columns, local shapes of weights, what stands on a pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SpecError
from ...frameworks import FRAMEWORKS
from ...frameworks.dtypes import Dtypes, dtypes
from ...schedules import SCHEDULES
from ...schedules.actions import Placement, PlacementKind
from ...spec.blocks import Block, Op, Weight
from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ...spec.precision import activation_bytes
from ..distinct import distinct
from ..message import Axis, Message, Phase
from ..stages import layers_of_rank, layers_per_stage
from ..table import IntColumn, PlanTable


def ceil_div(a: IntColumn | int, b: IntColumn | int) -> IntColumn:
    return -(-np.asarray(a, dtype=np.int64) // b)


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds, a column each: layers of every kind, the ends, its chunks and how many of them send on and back."""

    rank: IntColumn
    layers: dict[str, IntColumn]
    embedding: IntColumn
    head: IntColumn
    chunks: IntColumn
    sends_forward: IntColumn
    sends_backward: IntColumn
    regions: IntColumn  # recomputed in one piece: `recompute_every` layers each

    def blocks(self, model: ModelSpec) -> Iterator[tuple[Block, IntColumn]]:
        """Each kind of block with its number on this rank: layers, the two ends, multi-token-prediction layers (with the head)."""
        for name, count in self.layers.items():
            yield model.blocks[name], count
        yield model.embedding, self.embedding
        yield model.head, self.head
        for block in model.mtp:
            yield block, self.head


@dataclass
class Case:
    """The plans of one structure. `messages` collects what they send; `add` drops what no plan sends."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    structure: Structure
    table: PlanTable
    rank: IntColumn | None = None
    messages: list[Message] = field(default_factory=list)

    def add(
        self,
        axis: Axis,
        collective: str,
        phase: Phase,
        size: Any,
        calls: Any,
        ranks: Any,
        stride: Any,
        *,
        overlaps: str = "",
        what: str = "",
    ) -> None:
        shape = (len(self.table),)
        size, calls, ranks, stride = (np.broadcast_to(np.asarray(x, dtype=np.int64), shape) for x in (size, calls, ranks, stride))
        calls = np.where((ranks > 1) & (size > 0), calls, 0)
        if calls.any():
            self.messages.append(Message(axis, collective, phase, size, calls, ranks, stride, overlaps, what))

    def add_in_buckets(
        self,
        axis: Axis,
        collective: str,
        phase: Phase,
        total: IntColumn,
        bucket: IntColumn | int,
        calls: IntColumn | int,
        ranks: IntColumn,
        stride: IntColumn | int,
        overlaps: str,
        what: str,
    ) -> None:
        """`total` bytes as full buckets and a rest, so that the sum is exact."""
        full, rest = np.divmod(total, np.maximum(np.asarray(bucket, dtype=np.int64), 1))
        self.add(axis, collective, phase, bucket, full * calls, ranks, stride, overlaps=overlaps, what=what)
        self.add(axis, collective, phase, rest, calls, ranks, stride, overlaps=overlaps, what=f"{what}, the rest")

    # numbers of the plans
    @property
    def tp(self) -> IntColumn:
        return self.table.tp

    @property
    def micro_batches(self) -> IntColumn:
        """Micro-batches that pass through each chunk (half of them in each direction of DualPipe)."""
        m = self.table.accumulation
        return ceil_div(m, 2) if SCHEDULES[self.structure.schedule].placement == "bidirectional" else m

    @property
    def tokens(self) -> IntColumn:
        """Tokens of a micro-batch on one rank, before sequence parallelism: micro_batch x seq / cp."""
        return self.table.micro_batch_size * ceil_div(self.job.seq_len, self.table.cp)

    @property
    def activation_bytes(self) -> int:
        return activation_bytes(self.job.precision)

    @property
    def stored_bytes(self) -> int:
        """Bytes an element of a trained parameter that PyTorch owns."""
        return self.types.stored

    @cached_property
    def types(self) -> Dtypes:
        """Number formats where gradients are reduced: on one of several ranks."""
        return dtypes(FRAMEWORKS[self.structure.framework], self.job, self.structure, alone=False)

    @property
    def gradient_bytes(self) -> int:
        return self.types.reduced

    @property
    def reductions(self) -> IntColumn:
        """How often FSDP2 reduces a gradient: once a step, or with ``no_sync = false`` after each micro-batch; pipeline stages once all the same."""
        sharded = self.structure.sharding in ("zero2", "zero3")
        memory = FRAMEWORKS[self.structure.framework].memory
        each = sharded and not self.switch("no_sync", memory.puts_off(self.model.family, self.structure))
        return np.where(each & (self.table.pp == 1), self.table.accumulation, 1)

    @property
    def sequence_parallel(self) -> bool:
        return self.structure.sequence_parallel

    # groups: axes from inner to outer are tp, cp, dp_shard, dp_replicate, pp
    @property
    def shard(self) -> IntColumn:
        """Ranks that share one copy of sharded state: dp_shard x cp, `stride` tp apart."""
        return self.table.dp_shard * self.table.cp

    @property
    def replicate_stride(self) -> IntColumn:
        return self.tp * self.shard

    @property
    def data(self) -> IntColumn:
        """Ranks that average gradients: dp x cp."""
        return self.table.dp * self.table.cp

    @property
    def pipeline_stride(self) -> IntColumn:
        return self.tp * self.data

    @property
    def expert_shard(self) -> IntColumn:
        """Ranks that share one copy of an expert's sharded state: what is left of dp_shard x cp x tp after ep x etp."""
        return np.maximum(1, self.shard * self.tp // (self.table.ep * self.table.etp))

    @property
    def expert_data(self) -> IntColumn:
        return np.maximum(1, self.data * self.tp // (self.table.ep * self.table.etp))

    @property
    def apart(self) -> NDArray[np.bool_]:
        """Whether experts have ranks of their own to be cut or summed over."""
        return np.asarray((self.table.ep * self.table.etp > 1) | (self.tp > 1)) & bool(self.model.experts)

    @property
    def expert_stride(self) -> IntColumn:
        return self.table.ep * self.table.etp

    def switch(self, name: str, default: bool) -> bool:
        """A true-or-false option of the framework, by its own name."""
        value = dict(self.structure.options).get(name, default)
        if not isinstance(value, bool):
            raise SpecError(f"{str(value)[:40]!r} is not true or false", f"strategy.options.{name}", [str(default).lower()])
        return value

    def number(self, name: str, default: float, least: int = 0) -> int:
        """A whole number among the framework's options, at least `least`; ``auto`` is the default."""
        value = dict(self.structure.options).get(name, default)
        value = default if value == "auto" else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 2**62:
            raise SpecError(f"{str(value)[:40]!r} is not a number of {least} or more", f"strategy.options.{name}", [str(default)])
        return int(value)

    # weights
    @cached_property
    def vocab_multiple(self) -> int:
        return FRAMEWORKS[self.structure.framework].pad_vocab_multiple

    def local_shape(self, weight: Weight) -> list[IntColumn]:
        """Dimensions of the part that tensor and expert parallelism leave on the first rank (DTensor gives it the larger share)."""
        dims: list[IntColumn] = [np.full(len(self.table), d, dtype=np.int64) for d in weight.shape]
        expert = weight.ep_dim is not None
        if weight.ep_dim is not None:
            dims[weight.ep_dim] = ceil_div(dims[weight.ep_dim], self.table.ep)
        if weight.tp_dim is not None and (self.sequence_parallel or not weight.tp_needs_sp):
            d = weight.tp_dim
            size = self.table.etp if expert else self.tp
            if self.vocab_multiple > 1 and d == 0 and weight.shape[0] == self.model.vocab:
                dims[0] = ceil_div(dims[0], self.vocab_multiple * size) * self.vocab_multiple * size
            dims[d] = ceil_div(dims[d], size)
        return dims

    def local_elements(self, weight: Weight) -> IntColumn:
        return np.multiply.reduce(self.local_shape(weight))

    @cached_property
    def lora(self) -> bool:
        return self.job.method in ("lora", "qlora")

    def adapters(self, block: Block) -> tuple[Weight, ...]:
        """The two factors of every adapted product: A (rank x inputs) and B (outputs x rank), cut like the weight beside them."""
        if not self.lora:
            return ()
        r, found = self.job.lora_rank, []
        for op in block.ops:
            if (
                op.kind == "linear"
                and op.weights
                and block is not self.model.head
                and (not self.job.lora_targets or op.name in self.job.lora_targets)
            ):
                found += [
                    Weight(f"{op.name}.lora_a", (r, op.k), 1 if op.parallel == "row" else None),
                    Weight(f"{op.name}.lora_b", (op.width, r), 0 if op.parallel == "column" else None),
                ]
        return tuple(found)

    def weights(self, block: Block) -> tuple[Weight, ...]:
        return block.weights + self.adapters(block)

    def trainable(self, block: Block) -> tuple[Weight, ...]:
        return self.adapters(block) if self.lora else block.weights

    def is_expert(self, weight: Weight) -> bool:
        """Whether a weight belongs to the experts' groups (only where experts are spread or cut on their own)."""
        return weight.ep_dim is not None

    def total(self, weights: Callable[[Block], tuple[Weight, ...]], experts: bool) -> IntColumn:
        """Elements of those weights on the rank, the experts' or all others."""
        total = np.zeros(len(self.table), dtype=np.int64)
        for block, count in self.stage.blocks(self.model):
            for w in weights(block):
                if self.is_expert(w) == experts:
                    total = total + count * self.local_elements(w)
        return total + (0 if experts else self.tied_copy(weights))

    def tied_copy(self, weights: Callable[[Block], tuple[Weight, ...]]) -> IntColumn:
        """A tied head is a copy of the embedding where the embedding stands on another rank; in PyTorch, whose stages are modules of their own, wherever
        there is a pipeline."""
        split = self.table.pp > 1 if self.structure.framework in ("fsdp2", "fsdp1", "ddp") else 1 - self.stage.embedding
        alone = self.stage.head * split if self.model.tied else 0
        table = next((w for w in weights(self.model.embedding) if w.shape[0] == self.model.vocab), None)
        return np.asarray(alone * self.local_elements(table) if table is not None else 0 * self.tp)

    # pipeline
    @cached_property
    def stage(self) -> Stage:
        """The rank asked for, or the one with the most parameters (the first of equals)."""
        return pipeline_stage(self)


def _profile(model: ModelSpec, structure: Structure, pp: int, virtual: int) -> list[dict[str, int]]:
    """For each pipeline rank: number of layers of each kind, ends, chunks, sends."""
    even = FRAMEWORKS[structure.framework].even_stages
    return _profiles(
        model, SCHEDULES[structure.schedule].placement, structure.layers_per_stage, even, structure.recompute_every, pp, virtual
    )


@lru_cache(maxsize=4096)
def _profiles(
    model: ModelSpec, placement: PlacementKind, given: tuple[int, ...] | None, even: bool, every: int, pp: int, virtual: int
) -> list[dict[str, int]]:
    """`_profile` of all schedules of one placement."""
    names = list(model.blocks)
    stages = pp * virtual
    counts = layers_per_stage(model.num_layers, stages, given, even)
    v_shape = placement == "v" and virtual > 1
    ranks = layers_of_rank(counts, pp, v_shape)
    chunks_of: list[list[int]] = [[] for _ in range(pp)]
    for k in range(stages):
        chunks_of[_rank_of(k, pp, v_shape)].append(k)
    profiles = []
    for r, chunks in enumerate(chunks_of):
        layers = [model.layers[i] for span in ranks[r] for i in span]
        profile = {name: layers.count(name) for name in names}
        profile |= {
            "embedding": int(0 in chunks),
            "head": int(stages - 1 in chunks),
            "chunks": len(chunks),
            "on": sum(_rank_of(k + 1, pp, v_shape) != r for k in chunks if k < stages - 1),
            "back": sum(_rank_of(k - 1, pp, v_shape) != r for k in chunks if k > 0),
            "regions": sum(-(-len(span) // every) for span in ranks[r]),
        }
        profiles.append(profile)
    if placement == "bidirectional":  # every rank holds a stage of each direction
        profiles = [{key: a[key] + b[key] for key in a} for a, b in zip(profiles, reversed(profiles), strict=True)]
    return profiles


def chunks(model: ModelSpec, structure: Structure, pp: int, virtual: int, rank: int) -> list[tuple[range, bool, bool]]:
    """(layers, whether the embedding and the head stand there) of each of a rank's chunks, in the order of the model."""
    even = FRAMEWORKS[structure.framework].even_stages
    return _chunks(model.num_layers, SCHEDULES[structure.schedule].placement, structure.layers_per_stage, even, pp, virtual, rank)


@lru_cache(maxsize=4096)
def _chunks(
    layers: int, kind: PlacementKind, given: tuple[int, ...] | None, even: bool, pp: int, virtual: int, rank: int
) -> list[tuple[range, bool, bool]]:
    counts, last = layers_per_stage(layers, pp * virtual, given, even), pp * virtual - 1
    ends = np.cumsum(counts).tolist()
    return [(range(ends[k] - counts[k], ends[k]), k == 0, k == last) for k in Placement(kind, pp, virtual, 1).stages_of(rank)]


def _rank_of(stage: int, pp: int, v_shape: bool) -> int:
    chunk, position = divmod(stage, pp)
    return pp - 1 - position if v_shape and chunk % 2 else position


def _parameters(model: ModelSpec, profile: dict[str, int]) -> int:
    tied = model.vocab * model.hidden if model.tied and not profile["embedding"] else 0
    ends = profile["embedding"] * model.embedding.parameters + profile["head"] * (model.head.parameters + model.mtp_parameters + tied)
    return ends + sum(profile[name] * block.parameters for name, block in model.blocks.items())


def pipeline_stage(case: Case) -> Stage:
    table = case.table
    first, where = distinct((table.pp, table.virtual_stages))
    columns: dict[str, IntColumn] = {}
    rank = np.zeros(len(table), dtype=np.int64)
    for i, row in enumerate(first.tolist()):
        rows = where == i
        pp = int(table.pp[row])
        profiles = _profile(case.model, case.structure, pp, int(table.virtual_stages[row]))
        if case.rank is None:
            weights = [_parameters(case.model, p) for p in profiles]
            chosen = np.full(int(rows.sum()), weights.index(max(weights)))
        else:
            chosen = np.clip(case.rank[rows], 0, pp - 1)
        rank[rows] = chosen
        for name in profiles[0]:
            columns.setdefault(name, np.zeros(len(table), dtype=np.int64))[rows] = np.array([p[name] for p in profiles])[chosen]
    return Stage(
        rank,
        {name: columns[name] for name in case.model.blocks},
        columns["embedding"],
        columns["head"],
        columns["chunks"],
        columns["on"],
        columns["back"],
        columns["regions"],
    )


def column_inputs(block: Block) -> list[tuple[str, list[Op]]]:
    """The inputs of column-parallel products, each with the products that read it (q, k, v share one; gate and up another)."""
    found: dict[str, list[Op]] = {}
    for op in block.ops:
        if op.kind == "linear" and _column(op):
            found.setdefault(op.inputs[0], []).append(op)
    return list(found.items())


def row_products(block: Block) -> list[Op]:
    return [op for op in block.ops if op.kind == "linear" and op.parallel == "row"]


def _column(op: Op) -> bool:
    """A tied head has no weight of its own and is split by vocabulary like the table it reads."""
    return op.parallel == "column" or (not op.weights and op.region == "tensor")
