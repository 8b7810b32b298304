"""What a step is put together from: seconds of a layer, of the ends, of traffic, of the optimizer, for every plan; no pipeline yet.

What depends only on (micro-batch, tp, cp, ep, etp) is priced once for each different combination and spread over the plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..frameworks import FRAMEWORKS
from ..frameworks.base import TimeRules
from ..sharding import SHARDINGS
from ..spec.blocks import Block
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import Structure
from .collectives import collective_seconds
from .distinct import distinct
from .flops import Shares
from .interval import spread
from .kernels import Constants, Rates, rates
from .layer import BlockTime, block_time
from .message import Message
from .once import offload_seconds, optimizer_seconds, owned_parameters, saved_bytes
from .overlap import DATA, IN_LAYER, behind, in_layer
from .pipeline_time import stages_of
from .prices import price, take
from .sending import sending_seconds
from .software import software_factor, software_year
from .table import Column, PlanTable, contiguous

LAYER_PARTS = ("compute", "recompute", "tp", "cp", "ep", "host")


@dataclass(frozen=True)
class Pieces:
    """Columns of seconds; [kinds, plans] for layers, [2, plans] (forward, backward) for the ends, all of one micro-batch unless said otherwise.

    `forward`, `backward` (input gradient, recomputation), `weight`: one layer of each kind with its exposed traffic and the host's part; the
    `layer_parts` compute, recompute, tp, cp, ep, host sum to the three. `per_micro_batch` is what a rank pays besides its layers and holds
    `data_per_micro_batch`; `data_s`, `optimizer_s`, `offload_s` are paid once a step.
    """

    table: PlanTable
    kinds: tuple[Block, ...]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    weight: NDArray[np.float64]
    layer_parts: dict[str, NDArray[np.float64]]
    embedding: NDArray[np.float64]
    head: NDArray[np.float64]
    per_micro_batch: Column
    data_per_micro_batch: Column
    data_s: Column
    p2p_s: Column
    optimizer_s: Column
    offload_s: Column
    owned: Column  # parameters that a rank updates
    window_s: Column  # kernel seconds of one micro-batch, which offload of activations may hide behind
    nodes: Column
    message_seconds: list[Column]
    exposed_seconds: list[Column]
    interval: tuple[Column, Column]
    notes: list[tuple[str, ...]] = field(default_factory=list)


def shares_of(table: PlanTable, job: TrainingJob, structure: Structure) -> Shares:
    as_float = lambda c: c.astype(float)  # noqa: E731
    return Shares(
        tokens=as_float(table.micro_batch_size) * job.seq_len / table.cp,
        sequences=as_float(table.micro_batch_size),
        tp=as_float(table.tp),
        cp=as_float(table.cp),
        ep=as_float(table.ep),
        etp=as_float(table.etp),
        sequence_parallel=structure.sequence_parallel,
    )


def pieces(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: TrainingJob,
    table: PlanTable,
    messages: Sequence[Message],
    table_of_constants: Constants,
    rules: Mapping[str, TimeRules],
    detail: bool = True,
    beside: Sequence[Block] = (),
    known: dict[tuple[Structure, int, bool], BlockTime] | None = None,
) -> Pieces:
    """Everything but the pipeline, for every plan. Without `detail` neither parts of layers nor messages between stages, nor what shows of each.

    `beside`: messages hide as if every layer took as long as the longest of these. `known`: kernels that were priced for the same table.
    """
    n, kinds = len(table), tuple(block for block, _ in model.counts)
    if not detail:
        messages = [m for m in messages if m.axis != "pp"]
    made = Pieces(
        table=table,
        kinds=kinds,
        forward=np.zeros((len(kinds), n)),
        backward=np.zeros((len(kinds), n)),
        weight=np.zeros((len(kinds), n)),
        layer_parts={name: np.zeros((len(kinds), n)) for name in LAYER_PARTS} if detail else {},
        embedding=np.zeros((2, n)),
        head=np.zeros((2, n)),
        per_micro_batch=np.zeros(n),
        data_per_micro_batch=np.zeros(n),
        data_s=np.zeros(n),
        p2p_s=np.zeros(n),
        optimizer_s=np.zeros(n),
        offload_s=np.zeros(n),
        owned=np.zeros(n),
        window_s=np.zeros(n),
        nodes=table.gpus / cluster.gpus_per_node,
        message_seconds=[np.zeros(n) for _ in messages] if detail else [],
        exposed_seconds=[np.zeros(n) for _ in messages] if detail else [],
        interval=(np.ones(n), np.ones(n)),
        notes=[() for _ in table.structures],
    )
    for structure, rows in table.by_structure():
        place = contiguous(rows)
        mine = table if len(rows) == n else table.take(place)
        sent = [take(m, place) for m in messages]
        chosen = [k for k, m in enumerate(sent) if m.calls.any()]
        sent = [sent[k] for k in chosen]
        seconds = price(cluster, mine, sent)
        known = {} if known is None else known
        part = StructurePieces(
            model, cluster, job, structure, mine, sent, seconds, table_of_constants, rules[structure.framework], place, beside, known
        )
        visible = part.fill(made)
        for k, every, shown in zip(chosen, part.seconds, visible):
            if detail:
                made.message_seconds[k][place] = every
                made.exposed_seconds[k][place] = shown
    return made


@dataclass
class StructurePieces:
    """The plans of one structure on their way into `Pieces`; `rows` are their places in the whole table."""

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    structure: Structure
    table: PlanTable
    messages: list[Message]
    seconds: list[Column]
    constants: Constants
    rules: TimeRules
    rows: NDArray[np.intp] | slice
    beside: Sequence[Block] = ()
    known: dict[tuple[Structure, int, bool], BlockTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        t = self.table
        first, self.where = distinct((t.micro_batch_size, t.tp, t.cp, t.ep, t.etp))
        self.different = shares_of(t.take(first), self.job, self.structure)
        self.year = software_year(self.structure)
        self.rate: Rates = rates(self.cluster.gpu, self.job.precision, self.year, self.rules.attention, self.constants)
        self.age = software_factor(self.cluster, self.year, self.constants)
        self.m = t.accumulation.astype(float)

    def time_of(self, block: Block, end: bool = False) -> BlockTime:
        key = (self.structure, id(block), end)
        if key not in self.known:
            self.known[key] = block_time(block, self.different, self.job, self.structure, self.rules, self.rate, self.constants, end=end)
        return self.known[key]

    def spread(self, column: Column | float) -> Column:
        """From distinct combinations to plans."""
        return np.broadcast_to(column, self.different.tokens.shape)[self.where]

    def fill(self, out: Pieces) -> list[Column]:
        """Writes the rows of this structure; returns the exposed seconds of its messages."""
        times = [self.time_of(block) for block, _ in self.model.counts]
        layers, ends = reference_rank(self.model, self.structure, self.table)
        forward_window, backward_window = self._windows(times, layers)
        shown = self._in_layer(forward_window, backward_window)
        self._layers(out, times, layers, shown)
        self._ends(out)
        self._data(out, shown, layers, forward_window, backward_window)
        self._send(out, times, layers, ends)
        owned = owned_parameters(self.model, self.job, self.structure, self.table, layers, ends, self.different, self.spread)
        offload = self.structure.offload
        if offload in ("none", "activations-cpu"):
            out.optimizer_s[self.rows] = optimizer_seconds(owned, self.job, self.structure, self.rate.bytes_per_s, self.constants)
        if offload != "none":
            saved = (
                saved_bytes(self.model, self.cluster, self.job, self.table) if offload == "activations-cpu" else np.zeros(len(self.table))
            )
            out.offload_s[self.rows] = offload_seconds(
                offload, owned, saved, forward_window + backward_window, self.m, self.cluster, self.constants
            )
        out.owned[self.rows], out.window_s[self.rows] = owned, forward_window + backward_window
        low, high = spread(self.model, self.job, self.structure, self.rate, self.constants, self.cluster.gpu.measured is not None)
        out.interval[0][self.rows], out.interval[1][self.rows] = low, high
        note = (self.rate.relative,) if self.rate.relative else ()
        out.notes[out.table.structures.index(self.structure)] = note
        return shown

    def _windows(self, times: Sequence[BlockTime], layers: NDArray[np.float64]) -> tuple[Column, Column]:
        """Kernel seconds of one micro-batch forward and backward on the rank that the messages describe."""
        forward = sum((n * self.spread(t.forward) for n, t in zip(layers, times)), np.zeros(len(self.table)))
        backward = sum((n * self.spread(t.backward + t.recompute) for n, t in zip(layers, times)), np.zeros(len(self.table)))
        for time in map(self.time_of, self.beside):
            every = layers.sum(axis=0)
            forward = np.maximum(forward, every * self.spread(time.forward))
            backward = np.maximum(backward, every * self.spread(time.backward + time.recompute))
        return forward * self.age, backward * self.age

    def _in_layer(self, forward_window: Column, backward_window: Column) -> list[Column]:
        """Exposed seconds a step of every message inside layers; the others still whole. Messages that hide behind the same work share it."""
        slowdown = self.constants["overlap"]["slowdown"]
        windows = {True: self.m * forward_window, False: self.m * backward_window}
        beside: dict[tuple[str, bool], Column] = {}
        for m, seconds in zip(self.messages, self.seconds):
            if m.axis in IN_LAYER and m.overlaps:
                way = (m.axis, m.phase == "forward")
                beside[way] = beside[way] + seconds if way in beside else seconds
        shown = []
        for m, seconds in zip(self.messages, self.seconds):
            if m.axis not in IN_LAYER:
                shown.append(seconds)
                continue
            way = (m.axis, m.phase == "forward")
            window = windows[way[1]] * seconds / np.maximum(beside[way], 1e-12) if way in beside else windows[way[1]]
            shown.append(in_layer(m, seconds, window, self.structure, self.rules, self.year, slowdown))
        return shown

    def _per_layer(self, shown: list[Column], axis: str, phases: tuple[str, ...], layers: Column) -> Column:
        total = sum((s for m, s in zip(self.messages, shown) if m.axis == axis and m.phase in phases), np.zeros(len(self.table)))
        return np.where(layers > 0, total / np.maximum(layers * self.m, 1e-9), 0.0)

    def _layers(self, out: Pieces, times: Sequence[BlockTime], layers: NDArray[np.float64], shown: list[Column]) -> None:
        every = layers.sum(axis=0)
        moe = sum((n for n, (b, _) in zip(layers, self.model.counts) if b.rows("grouped_linear")), np.zeros(len(self.table)))
        comm = {
            (axis, way): self._per_layer(
                shown, axis, ("forward",) if way == "f" else ("backward", "recompute"), moe if axis == "ep" else every
            )
            for axis in IN_LAYER
            for way in ("f", "b")
        }
        law = self.constants["host"]
        host = 0.0 if self.structure.cuda_graphs else law.get("kernel_s", self.rules.host_seconds(self.year))
        join = serial if law.get("serial") else together
        for k, (time, (block, _)) in enumerate(zip(times, self.model.counts)):
            axes = [a for a in IN_LAYER if a != "ep" or block.rows("grouped_linear")]
            comm_f = sum((comm[a, "f"] for a in axes), np.zeros(len(self.table)))
            comm_b = sum((comm[a, "b"] for a in axes), np.zeros(len(self.table)))
            fetch = self._fetches(block)
            launch = time.kernels * host + self._expert_launches(time, block, host) + fetch
            gpu_f = self.spread(time.forward) * self.age
            gpu_b = self.spread(time.backward) * self.age
            again = self.spread(time.recompute) * self.age
            forward = join(gpu_f + comm_f, launch)
            backward = join(
                gpu_b + again + comm_b, launch + self.spread(time.recompute_kernels) * host + fetch * (self.structure.recompute == "full")
            )
            weight = self.spread(time.weight) * self.age
            r = self.rows
            out.forward[k, r] = forward
            out.backward[k, r] = backward - weight
            out.weight[k, r] = weight
            if not out.layer_parts:
                continue
            parts = out.layer_parts
            parts["compute"][k, r] = gpu_f + gpu_b
            parts["recompute"][k, r] = again
            for a in axes:
                parts[a][k, r] = comm[a, "f"] + comm[a, "b"]
            parts["host"][k, r] = forward + backward - (gpu_f + gpu_b + again + comm_f + comm_b)

    def _expert_launches(self, time: BlockTime, block: Block, host: float) -> Column | float:
        """Host seconds of routing and of what runs expert by expert: products, and casts in 8 bits."""
        if not host or not block.rows("grouped_linear"):
            return 0.0
        law = self.constants["host"]["expert_launches"]
        recipe = self.job.fp8_recipe or self.rules.default_fp8_recipe if self.job.precision in ("fp8", "fp4") else "none"
        wait = self.rules.host_s_per_dispatch * (self.job.moe_capacity_factor is None)
        return self.spread(time.experts) * self.rules.host_s_per_expert * law[recipe] + wait

    def _fetches(self, block: Block) -> float:
        """Host seconds of a pass in which a layer's sharded weights come and go one by one; all experts of a layer are fetched as one leaf."""
        if "parameters" not in SHARDINGS[self.structure.sharding].splits:
            return 0.0
        return self.rules.host_s_per_gather * len(block.weights)

    def _ends(self, out: Pieces) -> None:
        embedding, head = self.time_of(self.model.embedding, True), self.time_of(self.model.head, True)
        forward, backward = head.forward, head.backward
        for block in self.model.mtp:  # one more layer, and one more pass through the output projection
            extra = self.time_of(block, False)
            again = 0.0 if any(op.kind == "cross_entropy" for op in block.ops) else 1.0
            forward = forward + extra.forward + again * head.forward
            backward = backward + extra.backward + extra.recompute + again * head.backward
        out.embedding[0, self.rows] = self.spread(embedding.forward) * self.age
        out.embedding[1, self.rows] = self.spread(embedding.backward) * self.age
        out.head[0, self.rows] = self.spread(forward) * self.age
        out.head[1, self.rows] = self.spread(backward) * self.age

    def _data(self, out: Pieces, shown: list[Column], layers: NDArray[np.float64], forward_window: Column, backward_window: Column) -> None:
        """Data-parallel traffic: each phase hides behind its window, of every micro-batch where parameters are gathered for each."""
        each = self.structure.sharding in ("zero2", "zero3")
        slow = self.rules.gather_factor(self.year) if self.structure.sharding == "zero3" else 1.0
        if slow != 1.0:
            self.seconds = [s * slow if m.axis in DATA else s for m, s in zip(self.messages, self.seconds)]
            shown[:] = [s * slow if m.axis in DATA else s for m, s in zip(self.messages, shown)]
        # one chunk's collective runs beside the other chunks of the warm-up: a whole round of micro-batches
        chunked = np.where(self.table.virtual_stages > 1, np.minimum(self.m, self.table.pp), 1.0)
        times = self.m if each else chunked
        windows = {"forward": forward_window, "backward": backward_window, "reduce": backward_window}
        for phases in (("forward",), ("backward", "reduce"), ("optimizer",)):
            chosen = [k for k, m in enumerate(self.messages) if m.axis in DATA and m.phase in phases]
            if not chosen:
                continue
            hidden = [k for k in chosen if self._hides(self.messages[k])]
            beside = sum((self.seconds[k] for k in hidden), np.zeros(len(self.table)))
            window = windows.get(phases[-1], forward_window) * times
            left = behind(beside, window, self.constants["overlap"].get("residual", self.rules.dp_residual))
            share = np.where(beside > 0, left / np.maximum(beside, 1e-12), 1.0)
            for k in hidden:
                shown[k] = self.seconds[k] * share
        total = sum((s for m, s in zip(self.messages, shown) if m.axis in DATA), np.zeros(len(self.table)))
        loss = sum((s for m, s in zip(self.messages, shown) if m.phase == "loss" and m.axis not in DATA), np.zeros(len(self.table)))
        per = total / self.m if each else np.zeros_like(total)
        out.data_per_micro_batch[self.rows] = per
        out.per_micro_batch[self.rows] = per + self.rules.micro_batch_s + loss / self.m
        out.data_s[self.rows] = 0.0 if each else total
        self._pairs(out)

    def _send(self, out: Pieces, times: Sequence[BlockTime], layers: NDArray[np.float64], ends: NDArray[np.float64]) -> None:
        """The host's own part in sending, where it was measured."""
        law = self.constants["host"]
        if law.get("serial"):
            again = [self.spread(t.recompute_kernels) / max(t.kernels, 1.0) for t in times]
            found = sending_seconds(law, self.model, self.structure, self.table, self.messages, layers, ends, again)
            out.per_micro_batch[self.rows] += sum(found.values(), np.zeros(len(self.table))) / self.m

    def _hides(self, m: Message) -> bool:
        if m.overlaps:
            return self.year >= self.rules.overlaps_dp_since
        return m.phase == "reduce" and self.year >= self.rules.configures_overlap_since

    def _pairs(self, out: Pieces) -> None:
        """One message between stages; where each tensor-parallel rank sends its part, the gather at the receiver is fast and left out."""
        for m in self.messages:
            if m.axis == "pp" and m.collective == "send_recv":
                size = m.bytes_per_call
                if self.rules.scatters_p2p and not self.structure.sequence_parallel:
                    size = size // self.table.tp
                one = collective_seconds("send_recv", size, self.cluster, m.ranks, m.stride)
                out.p2p_s[self.rows] = np.where(m.calls > 0, np.maximum(out.p2p_s[self.rows], one), out.p2p_s[self.rows])


def together(gpu: Column, host: Column | float) -> Column:
    """Seconds of a layer whose kernels take `gpu` and whose launches take `host`: the longer one, joined smoothly, since neither runs ahead for ever.

    (gpu^3 + host^3)^(1/3); the exponent fits small models between 2 and 6, and 3 needs no logarithm.
    """
    share = host / gpu
    return np.asarray(gpu * np.cbrt(1.0 + share * share * share))


def serial(gpu: Column, host: Column | float) -> Column:
    """The same where the host that launches is the device that computes: one after the other."""
    return gpu + host


def reference_rank(model: ModelSpec, structure: Structure, table: PlanTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([kinds, plans] layers, [2, plans] embedding and head) of the pipeline rank with the most parameters, which the messages describe."""
    sizes = np.array([block.parameters for block, _ in model.counts], dtype=float)
    tied = model.vocab * model.hidden if model.tied else 0
    first, where = distinct((table.pp, table.virtual_stages))
    found = []
    for i in first.tolist():
        pp, virtual = int(table.pp[i]), int(table.virtual_stages[i])
        s = stages_of(model, pp, virtual, structure.schedule, structure.layers_per_stage, FRAMEWORKS[structure.framework].even_stages)
        counts = np.zeros((pp, len(sizes)))
        np.add.at(counts, s.rank, s.counts)
        end = np.zeros((pp, 2))
        end[s.rank[0], 0] = end[s.rank[-1], 1] = 1.0
        if s.bidirectional:
            counts, end = 0.5 * (counts + counts[::-1]), 0.5 * (end + end[::-1])
        weight = counts @ sizes + end[:, 0] * model.embedding.parameters
        weight = weight + end[:, 1] * (model.head.parameters + model.mtp_parameters + np.where(end[:, 0] > 0, 0, tied))
        r = int(weight.argmax())
        found.append(np.concatenate([counts[r], end[r]]))
    columns = np.array(found).T[:, where]
    return columns[:-2], columns[-2:]
