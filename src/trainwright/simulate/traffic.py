"""The bytes that every rank must send, from formulas: sizes and counts of the collectives of each strategy, without running anything.

`expected` gives {(purpose, collective): bytes} of one rank; the counters of a run must be equal, to the byte. Purposes: ``tp`` (activations), ``tp loss``,
``tp partial`` and ``tp copies``
(gradients of weights that all or some tensor-parallel ranks hold), ``cp``, ``ep``, ``ep counts``, ``pp``, ``weights``, ``gradients``, ``replicas``,
``twins`` (the same weight on several stages), ``loss``, ``norm`` (of the
whole gradient, for clipping), ``host``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import SpecError
from .collectives import bounds, ring_bytes, split_sizes, tree_bytes
from .context import positions_of
from .data import sequences_of
from .expert import Routing
from .fsdp import Optimizer, pack
from .layout import Coordinate, Layout
from .model import Parameter, TinyConfig, local_heads, parameters
from .pipeline import Plan, plan
from .recompute import saved_elements, saved_elements_of_head, segments

Table = dict[tuple[str, str], int]
Routes = Sequence[Mapping[tuple[int, int, int], Routing]]


class _Rank:
    """The sizes that one rank's formulas need."""

    def __init__(self, config: TinyConfig, layout: Layout, plan: Plan, rank: int, batch: int, length: int, itemsize: int) -> None:
        self.config, self.layout, self.plan, self.itemsize = config, layout, plan, itemsize
        self.rank, self.at = rank, layout.coordinate(rank)
        self.batch, self.length = batch, length
        self.lengths = [len(p) for p in positions_of(length, layout.cp, layout.cp_balance)]
        share = sequences_of(layout, self.at.replicate * layout.dp_shard + self.at.shard, batch)
        self.sequences = [hi - lo for lo, hi in share]
        self.tokens = [n * self.lengths[self.at.cp] for n in self.sequences]
        self.sent: Table = defaultdict(int)
        self.segment_of = {u: seg for units in plan.units for seg in segments(config, layout, units) for u in seg}
        self.stage_of = {unit: s for s, units in enumerate(plan.units) for unit in units}

    def here(self, unit: int) -> list[int]:
        """Microbatches whose pass through this unit is on this rank."""
        stage = self.stage_of[unit]
        return [m for m in range(self.layout.microbatches) if self.plan.rank_of(stage, m) == self.at.pp]

    @property
    def units(self) -> list[int]:
        return sorted(self.plan.units_of(self.at.pp))

    def inner(self, unit: int) -> bool:
        return 0 < unit < self.config.head_unit

    def again(self, unit: int) -> int:
        """Extra forwards by recomputation."""
        return int(self.layout.recompute == "full" and self.inner(unit))

    def ring(self, purpose: str, kind: str, sizes: Sequence[int], member: int, times: int = 1) -> None:
        """A ring collective over `sizes` elements per member."""
        if len(sizes) > 1:
            self.sent[purpose, kind] += times * ring_bytes(kind, [s * self.itemsize for s in sizes], member)

    def all_reduce(self, purpose: str, elements: int, group: Sequence[int], times: int = 1, algorithm: str = "ring") -> None:
        if algorithm == "tree" and len(group) > 1:
            halves = [h * self.itemsize for h in split_sizes(elements, 2)]
            self.sent[purpose, "all_reduce"] += times * tree_bytes(halves, len(group), group.index(self.rank))
            return
        self.ring(purpose, "all_reduce", split_sizes(elements, len(group)), group.index(self.rank), times)


def _tensor(r: _Rank) -> None:
    """Without sequence parallelism: 2 all-reduces forward and 2 backward a block, 1 for the embedding, 1 for the head. With it: see `sequence`."""
    layout, h = r.layout, r.config.hidden
    group = layout.group("tp", r.at)
    for unit in r.units:
        for m in r.here(unit):
            tokens, again = r.tokens[m], r.again(unit)
            rows = [n * h for n in split_sizes(tokens, layout.tp)]
            if not layout.sequence_parallel:
                count = 4 + 2 * again if r.inner(unit) else 1
                r.all_reduce("tp", tokens * h, group, count)
            else:
                gathers, scatters = (6 + 2 * again, 4 + 2 * again) if r.inner(unit) else (1, 1) if unit == 0 else (2, 1)
                r.ring("tp", "all_gather", rows, r.at.tp, gathers)
                r.ring("tp", "reduce_scatter", rows, r.at.tp, scatters)
            if unit == r.config.head_unit:
                r.all_reduce("tp loss", tokens, group, 3)


def _context(r: _Rank) -> None:
    """Ring: all blocks of keys and values but one forward; backward the same and every block's gradient.

    allgather: gathered forward and again backward, gradients reduce-scattered. ulysses: q, k, v to heads and the result to tokens, and the same back.
    """
    layout, config, n, me = r.layout, r.config, r.layout.cp, r.at.cp
    queries, heads = local_heads(config, layout.tp, r.at.tp)
    if n == 1:
        return
    mine = split_sizes(heads, n)[me]
    for unit in filter(r.inner, r.units):
        again = r.again(unit)
        for m in r.here(unit):
            width = r.sequences[m] * config.head_dim
            blocks = [2 * width * length * heads for length in r.lengths]
            if layout.cp_kind == "ring":
                once = sum(blocks) - blocks[(me + 1) % n]
                r.sent["cp", "send_recv"] += (once * (2 + again) + sum(blocks)) * r.itemsize
            elif layout.cp_kind == "allgather":
                r.ring("cp", "all_gather", blocks, me, 2 + again)
                r.ring("cp", "reduce_scatter", blocks, me)
            else:
                group = queries // heads
                to_heads, to_tokens = width * r.lengths[me] * (heads - mine), width * (sum(r.lengths) - r.lengths[me]) * mine
                forward = to_heads * (group + 2) + to_tokens * group
                backward = to_heads * group + to_tokens * (group + 2)
                r.sent["cp", "all_to_all"] += (forward * (1 + again) + backward) * r.itemsize


def _expert(r: _Rank, routes: Routes, step: int) -> None:
    """Rows to other ranks' experts and rows of other ranks back, twice forward and twice backward in all."""
    layout, config = r.layout, r.config
    if layout.ep == 1:
        return
    group = layout.group("ep", r.at)
    lo, hi = bounds(config.experts, layout.ep)[layout.ep_index(r.at)]
    for unit in filter(r.inner, r.units):
        for m in r.here(unit):
            kept = {g: routes[g][step, unit, m].kept for g in group}
            rows = sum(kept[r.rank]) - sum(kept[r.rank][lo:hi]) + sum(sum(kept[g][lo:hi]) for g in group if g != r.rank)
            r.sent["ep", "all_to_all"] += rows * config.hidden * r.itemsize * (2 + r.again(unit))
            r.sent["ep counts", "all_to_all"] += (config.experts - (hi - lo)) * 8 * (1 + r.again(unit))


def _pipeline(r: _Rank) -> None:
    """One boundary activation forward and one gradient back, per microbatch and boundary between ranks."""
    layout, last = r.layout, len(r.plan.units) - 1
    for m, tokens in enumerate(r.tokens):
        rows = split_sizes(tokens, layout.tp)[r.at.tp] if layout.sequence_parallel else tokens
        for stage in r.plan.stages_of(r.at.pp):
            if r.plan.rank_of(stage, m) != r.at.pp:
                continue
            for other in (stage + 1, stage - 1):
                if 0 <= other <= last and r.plan.rank_of(other, m) != r.at.pp:
                    r.sent["pp", "send_recv"] += rows * r.config.hidden * r.itemsize


def _local_size(p: Parameter, layout: Layout, at: Coordinate) -> int:
    slices = p.cut({"tp": layout.tp, "ep": layout.ep}, {"tp": at.tp, "ep": layout.ep_index(at)})
    return int(np.prod([len(range(*s.indices(n))) for s, n in zip(slices, p.shape)]))


def _gathers(r: _Rank, units: Sequence[int]) -> int:
    """How often a fully sharded bucket is gathered: in forward and in backward of every use, once more for a recomputed run of several blocks."""
    if not r.layout.reshard_after_forward:
        return 1
    return sum(len(r.here(u)) * (2 + (r.again(u) if len(r.segment_of[u]) > 1 else 0)) for u in units)


def _states(r: _Rank) -> None:
    """Weights and gradients over the data-parallel ranks: the table of `fsdp`."""
    layout, config, at = r.layout, r.config, r.at
    holders = r.plan.holders()
    params = [p for p in parameters(config) if p.unit in r.units or (config.tied and p.name == "embedding" and config.head_unit in r.units)]
    sizes = {p.name: _local_size(p, layout, at) for p in params}
    for members in pack(params, {n: s * r.itemsize for n, s in sizes.items()}, layout, config.tied):
        total = sum(sizes[p.name] for p in members)
        tied = config.tied and members[0].name == "embedding"
        units = {p.unit for p in members} | ({config.head_unit} if tied else set())
        mine = [u for u in sorted(units) if u in r.units]
        uses = sum(len(r.here(u)) for u in mine)
        prefix = "expert_" if members[0].expert else ""
        shard = layout.group(prefix + "shard", at) if layout.zero else (r.rank,)
        replicas = layout.group(prefix + "replicate" if layout.zero else prefix + "data", at)
        chunks, me = split_sizes(total, len(shard)), shard.index(r.rank)
        reduces = uses if layout.zero >= 2 else layout.microbatches if layout.reduce_every_microbatch else 1
        if layout.reduce_every_microbatch:
            reduces = len(r.here(mine[0]))
        gathers = _gathers(r, mine) if layout.zero == 3 or layout.offload == "parameters" else 1
        wanted = ("always", "sequence") if layout.sequence_parallel else ("always",)
        partial = sum(sizes[p.name] for p in members if p.tp_partial in wanted)
        r.all_reduce("tp partial", partial, layout.group("tp", at), reduces)
        copied = sum(sizes[p.name] for p in members if p.copied(layout.tp))
        r.all_reduce("tp copies", copied, layout.tp_copies(at, min(config.kv_heads, layout.tp)), reduces)
        r.ring("weights", "all_gather", chunks, me, gathers)
        r.ring("gradients", "reduce_scatter", chunks, me, reduces)
        if layout.zero:
            r.all_reduce("replicas", chunks[me], replicas)
        else:
            r.all_reduce("gradients", total, replicas, reduces, layout.all_reduce)
        twins = [layout.rank(at._replace(pp=p)) for p in sorted(set.union(*(holders[u] for u in units)))]
        r.all_reduce("twins", chunks[me], twins)
        _host_states(r, chunks[me] * r.itemsize, _gathers(r, mine))


def _host_states(r: _Rank, owned_bytes: int, gathers: int) -> None:
    if r.layout.offload in ("optimizer", "parameters"):
        r.sent["host", "to_host"] += owned_bytes
        r.sent["host", "from_host"] += owned_bytes * (gathers if r.layout.offload == "parameters" else 1)


def _loss(r: _Rank) -> None:
    """Token counts before, the loss after: one number each over the data-parallel ranks."""
    at_end = r.config.head_unit in r.units
    r.all_reduce("loss", 1, r.layout.group("data", r.at), 1 + at_end)
    ends = r.plan.holders()[r.config.head_unit]
    if at_end and len(ends) > 1:
        r.all_reduce("loss", 1, [r.layout.rank(r.at._replace(pp=p)) for p in sorted(ends)])


def _host_activations(r: _Rank) -> None:
    """What forward leaves behind goes to the host and comes back: the formulas of `recompute`."""
    if r.layout.offload != "activations":
        return
    for unit in r.units[(r.units[0] == 0) :]:
        for m in r.here(unit):
            size = _saved(r, unit, m) * r.itemsize
            r.sent["host", "to_host"] += size
            r.sent["host", "from_host"] += size


def _saved(r: _Rank, unit: int, m: int) -> int:
    if not r.inner(unit):
        return saved_elements_of_head(r.config, r.layout, r.tokens[m], r.at.tp)
    drop = r.layout.recompute == "full"
    if drop and unit != r.segment_of[unit][0]:
        return 0
    return saved_elements(r.config, r.layout, r.tokens[m], r.lengths[r.at.cp], r.at.tp, drop)


def expected(
    config: TinyConfig,
    layout: Layout,
    rank: int,
    *,
    batch: int,
    length: int,
    steps: int = 1,
    itemsize: int = 8,
    routes: Routes = (),
    clip: bool = False,
) -> Table:
    """{(purpose, collective): bytes} that `rank` sends in `steps` optimizer steps. `routes`: each rank's `Routing` log, for expert parallelism; `clip`: the
    optimizer clips.

    Offloaded activations have a formula for dense blocks only: `SpecError` with experts.
    """
    if layout.offload == "activations" and config.experts:
        raise SpecError(
            "what a mixture saves depends on its routing; there is no formula for its offload", "offload", "optimizer, parameters"
        )
    actions = plan(config, layout)
    total: Table = defaultdict(int)
    for step in range(1, steps + 1):
        r = _Rank(config, layout, actions, rank, batch, length, itemsize)
        for part in (_tensor, _context, _pipeline, _states, _loss, _host_activations):
            part(r)
        _expert(r, routes, step)
        if clip:
            r.all_reduce("norm", 1, range(layout.world_size))
        for key, size in r.sent.items():
            total[key] += size
    return {k: v for k, v in total.items() if v}


def states_bytes(config: TinyConfig, layout: Layout, rank: int, optimizer: Optimizer, itemsize: int = 8) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states that a rank holds at the end of backward: whole or 1/n as the ZeRO stage says."""
    at = layout.coordinate(rank)
    units = plan(config, layout).units_of(at.pp)
    params = [p for p in parameters(config) if p.unit in units or (config.tied and p.name == "embedding" and config.head_unit in units)]
    sizes = {p.name: _local_size(p, layout, at) for p in params}
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for members in pack(params, {n: s * itemsize for n, s in sizes.items()}, layout, config.tied):
        total = sum(sizes[p.name] for p in members)
        shard = layout.group(("expert_" if members[0].expert else "") + "shard", at) if layout.zero else (rank,)
        part = split_sizes(total, len(shard))[shard.index(rank)]
        found["parameters"] += itemsize * (part if layout.zero == 3 else total)
        found["gradients"] += itemsize * (part if layout.zero >= 2 else total)
        found["optimizer"] += itemsize * optimizer.states * part
    return found
