"""Which rank sits where: the mesh of a simulated run, its groups, and how the run is executed.

Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp (ranks of one tensor-parallel group are neighbors). Experts are spread over `ep`
neighbors of the flattened (dp_replicate, dp_shard, cp) axes, so every `ep` group works on different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SpecError, unknown
from ..schedules.actions import ActionTable
from .collectives import ALGORITHMS
from .model import TinyConfig, local_heads

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters", "activations")
CP_KINDS = ("ring", "allgather", "ulysses")
AVERAGES = ("tokens", "ranks", "microbatches")


class Coordinate(NamedTuple):
    """Where a rank sits on each axis."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis and the choices of one run; the defaults are one device.

    `zero` 0 to 3 shards over dp_shard x cp; 3 frees gathered weights after use. `schedule` is a name of the registry or action lists of one's own
    (for `pp` ranks and `microbatches`). `average` is how the loss is normalized: over all tokens (right), or as a
    mean of the ranks' or the microbatches' means (what goes wrong with unequal shares).
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str | ActionTable = "1f1b"
    virtual_stages: int = 0
    layers_per_stage: tuple[int, ...] = ()
    recompute: str = "none"
    recompute_every: int = 1
    offload: str = "none"
    flash: bool = True
    cp_balance: bool = True
    cp_kind: str = "ring"
    average: str = "tokens"
    bucket_bytes: int = 0
    all_reduce: str = "ring"
    reduce_every_microbatch: bool = False
    reshard_after_forward: bool = True

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def data_ranks(self) -> int:
        """Ranks that see different tokens and hold the same dense weights: dp x cp."""
        return self.data_parallel * self.cp

    @property
    def world_size(self) -> int:
        return self.pp * self.data_ranks * self.tp

    def coordinate(self, rank: int) -> Coordinate:
        rest, t = divmod(rank, self.tp)
        rest, c = divmod(rest, self.cp)
        rest, s = divmod(rest, self.dp_shard)
        p, r = divmod(rest, self.dp_replicate)
        return Coordinate(p, r, s, c, t)

    def rank(self, at: Coordinate) -> int:
        return (((at.pp * self.dp_replicate + at.replicate) * self.dp_shard + at.shard) * self.cp + at.cp) * self.tp + at.tp

    def data_index(self, at: Coordinate) -> int:
        """Position among the dp x cp ranks."""
        return (at.replicate * self.dp_shard + at.shard) * self.cp + at.cp

    def ep_index(self, at: Coordinate) -> int:
        return self.data_index(at) % self.ep

    def _at_data(self, at: Coordinate, index: int) -> int:
        rest, c = divmod(index, self.cp)
        r, s = divmod(rest, self.dp_shard)
        return self.rank(at._replace(replicate=r, shard=s, cp=c))

    def group(self, axis: str, at: Coordinate) -> tuple[int, ...]:
        """The ranks that differ from `at` on this axis only.

        Beside the axes themselves: `data` (dp x cp), `shard` (dp_shard x cp), `replicate`, `ep`, and the same three for experts, whose copies
        are `ep` ranks apart: `expert_data`, `expert_shard`, `expert_replicate`.
        """
        n, me, e = self.data_ranks, self.data_index(at), self.ep
        inner = self.dp_shard * self.cp
        if axis in ("tp", "cp", "pp"):
            return tuple(self.rank(at._replace(**{axis: i})) for i in range(getattr(self, axis)))
        data = {
            "data": range(n),
            "shard": range(me // inner * inner, (me // inner + 1) * inner),
            "replicate": range(me % inner, n, inner),
            "ep": range(me // e * e, (me // e + 1) * e),
            "expert_data": range(me % e, n, e),
        }
        if self.zero and e <= inner:
            data["expert_shard"] = range(me // inner * inner + me % e, (me // inner + 1) * inner, e)
            data["expert_replicate"] = range(me % inner, n, inner)
        if axis not in data:
            raise unknown("group", axis, [*data, "tp", "cp", "pp"])
        return tuple(self._at_data(at, i) for i in data[axis])

    def tp_copies(self, at: Coordinate, pieces: int) -> tuple[int, ...]:
        """The tensor-parallel ranks that hold the same one of `pieces` pieces (more ranks than pieces) as `at`."""
        return tuple(self.rank(at._replace(tp=t)) for t in range(self.tp) if t * pieces // self.tp == at.tp * pieces // self.tp)

    def check(self, config: TinyConfig, batch: int, length: int) -> Layout:
        """This layout, or `SpecError` with the reason and the nearest legal value."""
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "microbatches", "recompute_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SpecError(f"{value!r} is not a whole number of at least 1", name, "1")
        if self.zero not in (0, 1, 2, 3):
            raise SpecError(f"ZeRO stage {self.zero!r} does not exist", "zero", [0, 1, 2, 3])
        for name, legal in (
            ("recompute", RECOMPUTE),
            ("offload", OFFLOAD),
            ("average", AVERAGES),
            ("cp_kind", CP_KINDS),
            ("all_reduce", ALGORITHMS),
        ):
            if getattr(self, name) not in legal:
                raise unknown(name, getattr(self, name), legal, name)
        self._check_tensor(config)
        self._check_data(config, batch, length)
        return self

    def _check_tensor(self, config: TinyConfig) -> None:
        if self.tp > config.kv_heads and (self.tp % config.kv_heads or config.heads % self.tp):
            legal = [t for t in range(1, config.heads + 1) if t <= config.kv_heads or (t % config.kv_heads == 0 and config.heads % t == 0)]
            near = sorted(legal, key=lambda t: (abs(t - self.tp), t))[:3]
            heads = f"{config.heads} heads with {config.kv_heads} key-value heads"
            raise SpecError(f"{heads} cannot be spread over {self.tp} tensor-parallel ranks", "tp", sorted(near))
        if self.tp > min(config.ffn, config.vocab):
            raise SpecError(
                f"{self.tp} ranks are more than the feed-forward width or the vocabulary", "tp", [min(config.ffn, config.vocab)]
            )

    def _check_data(self, config: TinyConfig, batch: int, length: int) -> None:
        need = self.data_parallel * self.microbatches
        if batch < need:
            raise SpecError(
                f"{batch} sequences are fewer than {self.data_parallel} data-parallel ranks x {self.microbatches} microbatches",
                "batch",
                [need],
            )
        if self.cp > 1 and length < 2 * self.cp:
            raise SpecError(f"{length} tokens are fewer than the 2 x {self.cp} pieces of context parallelism", "length", [2 * self.cp])
        if config.positions == "learned" and length > config.max_length:
            raise SpecError(f"{length} tokens are more than the {config.max_length} learned positions", "length", [config.max_length])
        least = min(local_heads(config, self.tp, t)[1] for t in range(self.tp))
        if self.cp_kind == "ulysses" and self.cp > least:
            raise SpecError(f"ulysses spreads {least} key-value heads of a tensor-parallel rank over {self.cp} ranks", "cp", [least])
        if self.ep > 1 and not config.experts:
            raise SpecError("expert parallelism needs a model with experts", "ep", "1")
        inner = self.dp_shard * self.cp if self.zero else self.data_ranks
        if inner % self.ep or self.ep > max(config.experts, 1):
            most = min(inner, max(config.experts, 1))
            legal = [d for d in range(1, most + 1) if inner % d == 0]
            raise SpecError(
                f"{config.experts} experts over ep = {self.ep} ranks, taken from {inner} data ranks, does not work out", "ep", legal
            )
        if self.zero == 0 and self.dp_shard > 1:
            raise SpecError("dp_shard needs zero of at least 1; plain data parallelism is dp_replicate", "dp_shard", "1")
        if self.zero and self.reduce_every_microbatch:
            raise SpecError("reducing after every microbatch is a choice of plain data parallelism (zero 0)", "zero", "0")
