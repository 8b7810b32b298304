"""Who holds which weights, gradients and optimizer states, and when: plain data parallelism, ZeRO-1, 2, 3 (FSDP) and HSDP.

Weights live in buckets (one per block, as FSDP's units; DDP's by size). With n ranks in the shard group and one unit = (n-1)/n of a bucket's bytes:

    zero  kept whole            kept in 1/n               sent per step by a rank (m microbatches)
    0     weights, grads, Adam  -                         2 units   all-reduce of gradients
    1     weights, grads        Adam                      2         reduce-scatter of gradients, all-gather of weights
    2     weights               grads, Adam               m + 1     a reduce-scatter per microbatch
    3     -                     weights, grads, Adam      3 m       all-gather in forward and again in backward, reduce-scatter

HSDP shards within `dp_shard` and sums the shards over `dp_replicate`: one all-reduce of 1/n of the bytes per step, the only traffic that leaves the shard
group. Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .collectives import Array, bounds
from .layout import Coordinate, Layout
from .memory import Ledger
from .model import Parameter, TinyConfig
from .world import Group, Rank


@dataclass(frozen=True)
class Optimizer:
    """AdamW or plain SGD on flat arrays. Adam: m, v with bias correction; Loshchilov and Hutter 2019.

    The defaults are Llama 2's (betas 0.9 and 0.95, eps 1e-5). A rounding error r of a gradient near zero moves a weight by up to rate / eps x r.
    """

    kind: str = "adam"
    rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    decay: float = 0.01
    clip: float = 0.0  # largest norm of the whole gradient; 0: no clipping

    @property
    def states(self) -> int:
        return 2 if self.kind == "adam" else 0

    def step(self, weights: Array, gradient: Array, states: list[Array], step: int) -> Array:
        """New weights; `states` are changed in place. `step` counts from 1."""
        if self.kind == "sgd":
            return weights - weights.dtype.type(self.rate) * gradient
        m, v = states
        m += (1 - self.beta1) * (gradient - m)
        v += (1 - self.beta2) * (gradient * gradient - v)
        update = (m / (1 - self.beta1**step)) / (np.sqrt(v / (1 - self.beta2**step)) + self.eps)
        return weights - self.rate * (update + self.decay * weights)


@dataclass
class Bucket:
    """Weights that are stored, gathered and reduced as one flat array."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    units: set[int]
    shard_group: Group
    replicate_group: Group
    twins: Group
    partial: list[str]
    copied: list[str]
    owned: Array
    full: Array | None = None
    gradient: Array | None = None  # of the whole bucket, not yet reduced
    reduced: Array | None = None  # what this rank owns of the sum
    states: list[Array] = field(default_factory=list)
    users: int = 0

    def __post_init__(self) -> None:
        ends = np.cumsum([0, *(int(np.prod(s)) for s in self.shapes)]).tolist()
        self.places = {n: (a, b, s) for n, a, b, s in zip(self.names, ends[:-1], ends[1:], self.shapes)}
        self.size = ends[-1]
        self.chunks = bounds(self.size, self.shard_group.size)

    def view(self, flat: Array, name: str) -> Array:
        lo, hi, shape = self.places[name]
        return flat[lo:hi].reshape(shape)


def pack(params: Iterable[Parameter], local_bytes: Mapping[str, int], layout: Layout, tied: bool) -> list[list[Parameter]]:
    """Buckets: one per unit, experts apart, a tied weight by itself; with `bucket_bytes` DDP's, filled from the last weight to the first."""
    groups: dict[object, list[Parameter]] = {}
    if layout.zero or not layout.bucket_bytes:
        for p in params:
            groups.setdefault("tied" if tied and p.name == "embedding" else (p.unit, p.expert), []).append(p)
        return list(groups.values())
    number, filled = dict.fromkeys((False, True), 0), dict.fromkeys((False, True), 0)
    for p in reversed(list(params)):
        if tied and p.name == "embedding":
            groups["tied"] = [p]
            continue
        groups.setdefault((p.expert, number[p.expert]), []).append(p)
        filled[p.expert] += local_bytes[p.name]
        if filled[p.expert] >= layout.bucket_bytes:
            number[p.expert], filled[p.expert] = number[p.expert] + 1, 0
    return list(groups.values())


class Store:
    """One rank's share of the model. `weight(name)` is readable only while its unit is gathered: nothing can use what another rank holds."""

    def __init__(
        self,
        config: TinyConfig,
        layout: Layout,
        rank: Rank,
        at: Coordinate,
        units: set[int],
        holders: Mapping[int, set[int]],
        cut: Callable[[Parameter], Array],
        params: list[Parameter],
        ledger: Ledger,
        optimizer: Optimizer,
    ) -> None:
        self.layout, self.ledger, self.optimizer, self.rank = layout, ledger, optimizer, rank
        self.head_unit = config.head_unit
        self.tp = rank.group(layout.group("tp", at))
        self.cut_by_tp = {p.name for p in params if "tp" in p.split}
        self.world = rank.group(range(rank.world.size))
        self.tp_copies = rank.group(layout.tp_copies(at, min(config.kv_heads, layout.tp)))
        self.buckets: list[Bucket] = []
        used = [p for p in params if p.unit in units or (config.tied and p.name == "embedding" and config.head_unit in units)]
        local = {p.name: cut(p) for p in used}
        for members in pack(used, {n: a.nbytes for n, a in local.items()}, layout, config.tied):
            self.buckets.append(self._bucket(config, at, members, local, holders))
        self._by_unit: dict[int, list[Bucket]] = {}
        self._by_name = {n: b for b in self.buckets for n in b.names}
        for bucket in self.buckets:
            for unit in bucket.units & units:
                self._by_unit.setdefault(unit, []).append(bucket)

    def _bucket(
        self, config: TinyConfig, at: Coordinate, members: list[Parameter], local: dict[str, Array], holders: Mapping[int, set[int]]
    ) -> Bucket:
        layout, expert = self.layout, members[0].expert
        tied = config.tied and members[0].name == "embedding"
        units = {p.unit for p in members} | ({config.head_unit} if tied else set())
        pipeline = sorted(set.union(*(holders[u] for u in units)))
        prefix = "expert_" if expert else ""
        alone = self.rank.group((self.rank.index,))
        sharded = self.rank.group(layout.group(prefix + "shard", at)) if layout.zero else alone
        replicas = layout.group(prefix + "replicate", at) if layout.zero else layout.group(prefix + "data", at)
        wanted = ("always", "sequence") if layout.sequence_parallel else ("always",)
        flat = np.concatenate([local[p.name].reshape(-1) for p in members])
        bucket = Bucket(
            [p.name for p in members],
            [local[p.name].shape for p in members],
            units,
            sharded,
            self.rank.group(replicas),
            self.rank.group([layout.rank(at._replace(pp=p)) for p in pipeline]),
            [p.name for p in members if p.tp_partial in wanted and layout.tp > 1],
            [p.name for p in members if p.copied(layout.tp)],
            flat,
        )
        lo, hi = bucket.chunks[sharded.me]
        mine = flat[lo:hi].copy()
        if layout.zero == 3 or layout.offload == "parameters":
            bucket.owned = mine
            self.ledger.hold("host" if layout.offload == "parameters" else "parameters", mine.nbytes)
        else:
            bucket.full, bucket.owned = flat, mine
            self.ledger.hold("parameters", flat.nbytes)
        bucket.states = [np.zeros_like(mine) for _ in range(self.optimizer.states)]
        self.ledger.hold("optimizer" if layout.offload in ("none", "activations") else "host", self.optimizer.states * mine.nbytes)
        return bucket

    # --- weights -------------------------------------------------------------------------------------------------------------------------------

    @property
    def fleeting(self) -> bool:
        """Whether whole weights exist only while they are used."""
        return self.layout.zero == 3 or self.layout.offload == "parameters"

    def weight(self, name: str) -> Array:
        bucket = self._by_name[name]
        if bucket.full is None:
            raise RuntimeError(f"rank {self.rank.index} uses {name} after it was freed")
        return bucket.view(bucket.full, name)

    def gather(self, unit: int) -> None:
        """Make a unit's weights whole on this rank; nested calls count."""
        for bucket in self._by_unit[unit]:
            bucket.users += 1
            if bucket.full is None:
                if self.layout.offload == "parameters":
                    self.host("from_host", bucket.owned.nbytes)
                bucket.full = np.concatenate(bucket.shard_group.all_gather(bucket.owned, "weights"))
                self.ledger.hold("gathered", bucket.full.nbytes)
                self.ledger.mark(f"gather {self.label(unit)}")

    def release(self, unit: int) -> None:
        """This use of the unit is over; the last one frees what was gathered (with `reshard_after_forward` off it stays until the optimizer step)."""
        for bucket in self._by_unit[unit]:
            bucket.users -= 1
            if self.fleeting and self.layout.reshard_after_forward and bucket.users == 0 and bucket.full is not None:
                self.ledger.free("gathered", bucket.full.nbytes)
                bucket.full = None
                self.ledger.mark(f"free {self.label(unit)}")

    def label(self, unit: int) -> str:
        return {0: "embedding", self.head_unit: "head"}.get(unit, f"block {unit}")

    def host(self, direction: str, size: int) -> None:
        """Count bytes over the link to host memory."""
        count = self.rank.world.traffic.at(self.rank.index, "host", direction)
        count.bytes_sent += size
        count.messages += 1
        count.calls += 1

    # --- gradients -----------------------------------------------------------------------------------------------------------------------------

    def add(self, name: str, gradient: Array) -> None:
        """Add to the gradient of a weight (this rank's tokens only, so far)."""
        bucket = self._by_name[name]
        if bucket.gradient is None:
            bucket.gradient = np.zeros(bucket.size, bucket.owned.dtype)
            self.ledger.hold("gradients", bucket.gradient.nbytes)
        bucket.view(bucket.gradient, name)[...] += gradient

    def add_at(self, name: str, index: int, gradient: Array) -> None:
        """`add` to one entry of the weight's first dim (one expert of a stack)."""
        self.add(name, np.zeros(()))
        bucket = self._by_name[name]
        if bucket.gradient is not None:
            bucket.view(bucket.gradient, name)[index] += gradient

    def snapshot(self, weights: bool = False) -> dict[str, tuple[int, Array, int]]:
        """This rank's share of every gradient (or weight): {name: (first element of the local tensor, elements, local size)}."""
        found = {}
        for bucket in self.buckets:
            lo, hi = bucket.chunks[bucket.shard_group.me]
            flat = bucket.owned if weights else bucket.reduced
            if flat is None:
                continue
            for name, (a, b, _) in bucket.places.items():
                first, last = max(a, lo), min(b, hi)
                if first < last:
                    found[name] = (first - a, flat[first - lo : last - lo].copy(), b - a)
        return found

    def end_unit(self, unit: int) -> None:
        """A unit's backward of one microbatch is complete: ZeRO-2 and 3 reduce it and keep only their part."""
        if self.layout.zero >= 2:
            for bucket in self._by_unit[unit]:
                self._reduce(bucket)

    def end_microbatch(self) -> None:
        if self.layout.reduce_every_microbatch:
            for bucket in self.buckets:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        gradient = bucket.gradient
        if gradient is None:
            return
        for names, group, tag in ((bucket.partial, self.tp, "tp partial"), (bucket.copied, self.tp_copies, "tp copies")):
            views = [bucket.view(gradient, n) for n in names]
            if views:
                summed = group.all_reduce(np.concatenate([v.reshape(-1) for v in views]), tag)
                for view in views:
                    view[...], summed = summed[: view.size].reshape(view.shape), summed[view.size :]
        if self.layout.zero:
            part = bucket.shard_group.reduce_scatter([gradient[lo:hi] for lo, hi in bucket.chunks], "gradients")
        else:
            part = bucket.replicate_group.all_reduce(gradient, "gradients", self.layout.all_reduce)
        bucket.gradient = None
        self.ledger.free("gradients", gradient.nbytes)
        if bucket.reduced is None:
            bucket.reduced = part.copy()
            self.ledger.hold("gradients", part.nbytes)
        else:
            bucket.reduced += part
        self.ledger.mark(f"reduce {', '.join(self.label(u) for u in sorted(bucket.units))}")

    def finish_gradients(self) -> None:
        """After the last microbatch: whatever is left to reduce, over replicas and over the other stages that hold the same weight."""
        for bucket in self.buckets:
            self._reduce(bucket)
            if bucket.reduced is None:
                raise RuntimeError(f"no gradient for {bucket.names}")
            if self.layout.zero:
                bucket.reduced = bucket.replicate_group.all_reduce(bucket.reduced, "replicas")
            bucket.reduced = bucket.twins.all_reduce(bucket.reduced, "twins")

    def clip(self) -> None:
        """Scale every gradient down where the norm of the whole model's is over the limit.

        The norm is of all weights wherever they are: each rank adds the squares of what it owns, each element divided by the number of ranks that own
        a copy of it, and one number is summed over the world. Adding up every rank's own norm would count replicas, and norms alone would miss shards.
        """
        total = 0.0
        for bucket in self.buckets:
            lo, hi = bucket.chunks[bucket.shard_group.me]
            for name, (a, b, _) in bucket.places.items():
                part = bucket.reduced[max(a, lo) - lo : max(min(b, hi) - lo, 0)] if bucket.reduced is not None else np.zeros(0)
                total += float((part * part).sum()) / (bucket.replicate_group.size * bucket.twins.size * self._tp_holders(bucket, name))
        norm = float(self.world.all_reduce(np.array([total]), "norm")[0]) ** 0.5
        if norm > self.optimizer.clip:
            for bucket in self.buckets:
                if bucket.reduced is not None:
                    bucket.reduced = bucket.reduced * (self.optimizer.clip / norm)

    def _tp_holders(self, bucket: Bucket, name: str) -> int:
        """How many tensor-parallel ranks hold the same part of this weight."""
        if name in bucket.copied:
            return self.tp_copies.size
        return 1 if name in self.cut_by_tp else self.tp.size

    def step(self, number: int) -> None:
        """One optimizer step on what this rank owns, then (ZeRO-1, 2) everyone's new weights are gathered."""
        if self.optimizer.clip:
            self.clip()
        for bucket in self.buckets:
            gradient = bucket.reduced
            if gradient is None:
                raise RuntimeError("step before the gradients are finished")
            if self.layout.offload in ("optimizer", "parameters"):
                self.host("to_host", gradient.nbytes)
            bucket.owned = self.optimizer.step(bucket.owned, gradient, bucket.states, number)
            if self.layout.offload == "optimizer":
                self.host("from_host", bucket.owned.nbytes)
            if bucket.full is not None:
                if self.fleeting:
                    self.ledger.free("gathered", bucket.full.nbytes)
                    bucket.full = None
                else:
                    bucket.full = np.concatenate(bucket.shard_group.all_gather(bucket.owned, "weights"))
            self.ledger.free("gradients", gradient.nbytes)
            bucket.reduced = None
