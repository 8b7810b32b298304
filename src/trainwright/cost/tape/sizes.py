"""Sizes as symbols: whole linear combinations of named columns, so that one replay holds for every plan of a structure.

A `Size` is a tuple of (symbol, coefficient). A symbol is a whole number for each plan, e.g. tokens times the local part of a width; what is
divided by a parallel degree is rounded up, as the largest rank (rank 0) holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...spec.blocks import Weight
from ...spec.optimizer import Optimizer
from ..parameters import greedy_partition, optimizer_state, product
from ..table import IntColumn, PlanTable

Size = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Columns:
    """What a symbol is computed from, one entry a plan. `shards` are the ranks that cut a parameter, `tokens` those of one micro-batch."""

    batch: IntColumn
    seq: IntColumn  # tokens of a sequence on this rank (divided by cp)
    full_seq: IntColumn
    tp: IntColumn
    cp: IntColumn
    ep: IntColumn
    etp: IntColumn
    shards: IntColumn
    replicas: IntColumn
    microbatches: IntColumn
    chunks: IntColumn  # of a pipeline rank
    accumulated: IntColumn  # 1 where whole gradients of earlier micro-batches are there
    summed: IntColumn  # 1 where their shards are there: reduced every micro-batch

    @property
    def tokens(self) -> IntColumn:
        return self.batch * self.seq

    @classmethod
    def of(cls, table: PlanTable, seq_len: int, *, shard_over_cp: bool = True) -> Columns:
        """FSDP2 cuts parameters over dp_shard x cp, as torchtitan's mesh does."""
        full = np.full(len(table), seq_len, dtype=np.int64)
        return cls(
            batch=table.micro_batch_size,
            seq=-(-full // table.cp),
            full_seq=full,
            tp=table.tp,
            cp=table.cp,
            ep=table.ep,
            etp=table.etp,
            shards=table.dp_shard * (table.cp if shard_over_cp else 1),
            replicas=table.dp_replicate,
            microbatches=table.accumulation,
            chunks=table.virtual_stages,
            accumulated=(table.accumulation > 1).astype(np.int64),
            summed=np.zeros(len(table), dtype=np.int64),
        )

    def take(self, rows: NDArray[np.intp]) -> Columns:
        return Columns(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def with_(self, **columns: IntColumn) -> Columns:
        return replace(self, **columns)


def ceil_div(a: IntColumn | int, b: IntColumn) -> IntColumn:
    return -(-a // b)


@lru_cache(maxsize=4096)
def times(size: Size, factor: int) -> Size:
    return size if factor == 1 else tuple((s, c * factor) for s, c in size)


def plus(*sizes: Size) -> Size:
    total: dict[int, int] = {}
    for size in sizes:
        for s, c in size:
            total[s] = total.get(s, 0) + c
    return tuple(total.items())


CONDITIONS: dict[str, Callable[[Columns], IntColumn]] = {
    "accumulating": lambda c: c.accumulated,
    "one micro-batch": lambda c: 1 - c.accumulated,
    "adding to shards": lambda c: c.summed,
    "first shards": lambda c: 1 - c.summed,
    "three micro-batches": lambda c: (c.microbatches > 2).astype(np.int64),
    "one sequence": lambda c: (c.batch == 1).astype(np.int64),
    "several sequences": lambda c: (c.batch > 1).astype(np.int64),
    "replicas": lambda c: (c.replicas > 1).astype(np.int64),
}


@dataclass(frozen=True)
class Symbol:
    formula: str
    value: Callable[[Columns], IntColumn]


class Symbols:
    """The named sizes of one replay. `sequence_parallel` and `tensor_parallel` say which regions are divided."""

    def __init__(self, *, tensor_parallel: bool = False, sequence_parallel: bool = False) -> None:
        self.tensor_parallel = tensor_parallel
        self.sequence_parallel = sequence_parallel and tensor_parallel
        self.table: list[Symbol] = []
        self._ids: dict[str, int] = {}

    def symbol(self, formula: str, value: Callable[[Columns], IntColumn], factor: int = 1) -> Size:
        found = self._ids.get(formula)
        if found is None:
            found = self._ids[formula] = len(self.table)
            self.table.append(Symbol(formula, value))
        return ((found, factor),)

    def when(self, size: Size, condition: str) -> Size:
        """`size` where a condition on a plan's numbers holds, else nothing: so that one replay holds for both."""
        return self._where(size, condition, CONDITIONS[condition])

    def cut(self, size: Size, w: Weight, *, within: bool) -> Size:
        """`size` where a stack is cut within its experts, or where it is not."""
        words = f"{self._words([(w, 1)])} is {'' if within else 'not '}cut within experts"
        tensor = self.splits(w) is not None
        return self._where(size, words, lambda c: (cut_within(w, c, tensor) == within).astype(np.int64))

    def _where(self, size: Size, condition: str, test: Callable[[Columns], IntColumn]) -> Size:
        made: list[tuple[int, int]] = []
        for s, count in size:
            whole = self.table[s]
            made += self.symbol(f"{whole.formula} if {condition}", _masked(whole, test), count)
        return tuple(made)

    def one(self, count: int) -> Size:
        return self.symbol("1", lambda c: np.ones_like(c.batch), count)

    def tokens(self, width: int = 1) -> Size:
        """Every token of the micro-batch on this rank."""
        return self.symbol("tokens", lambda c: c.tokens, width)

    def piece(self, i: int, of: int, width: int = 1) -> Size:
        """Tokens of the i-th of so many pieces of the sequence, the last ones shorter or empty (``Tensor.chunk``)."""
        return self.symbol(f"tokens of piece {i + 1}/{of}", lambda c: c.batch * _piece(c.seq, i, of), width)

    def every_rank(self, width: int = 1) -> Size:
        """Tokens of all ranks of context parallelism."""
        return self.symbol("cp tokens", lambda c: c.cp * c.tokens, width)

    def room(self, experts: int, top_k: int, factor: float, width: int = 1) -> Size:
        """Rows of all experts, each with the same capacity."""
        name = f"{experts} ceil({factor:g} {top_k} tokens/{experts})"
        return self.symbol(name, lambda c: experts * np.ceil(factor * c.tokens * top_k / experts).astype(np.int64), width)

    def sequence(self, width: int = 1) -> Size:
        """The sequence region: tokens / tp with sequence parallelism."""
        if not self.sequence_parallel:
            return self.tokens(width)
        return self.symbol("batch ceil(seq/tp)", lambda c: c.batch * ceil_div(c.seq, c.tp), width)

    def split(self, width: int, factor: int = 1) -> Size:
        """The tensor region: every token, width / tp elements."""
        if not self.tensor_parallel:
            return self.tokens(width * factor)
        return self.symbol(f"tokens ceil({width}/tp)", lambda c: c.tokens * ceil_div(width, c.tp), factor)

    def region(self, region: str, width: int) -> Size:
        return self.split(width) if region == "tensor" else self.sequence(width)

    def every_microbatch(self, width: int) -> Size:
        """Tokens of all micro-batches of a step."""
        return self.symbol("microbatches tokens", lambda c: c.microbatches * c.tokens, width)

    def received(self, width: int, end: bool) -> Size:
        """Boundary tensors of a pipeline rank for all micro-batches of a step, of each of its chunks but one that is an end of the model."""
        which = "(chunks - 1)" if end else "chunks"
        if not self.sequence_parallel:
            return self.symbol(f"{which} microbatches tokens", lambda c: (c.chunks - end) * c.microbatches * c.tokens, width)
        name = f"{which} microbatches batch ceil(seq/tp)"
        return self.symbol(name, lambda c: (c.chunks - end) * c.microbatches * c.batch * ceil_div(c.seq, c.tp), width)

    def positions(self, width: int = 1) -> Size:
        """Something for each position of the sequence, whatever the batch."""
        return self.symbol("seq", lambda c: c.seq, width)

    def position_sequence(self, width: int = 1) -> Size:
        """The same in the sequence region."""
        if not self.sequence_parallel:
            return self.positions(width)
        return self.symbol("ceil(seq/tp)", lambda c: ceil_div(c.seq, c.tp), width)

    def scores(self, heads: int, factor: int = 1) -> Size:
        """Attention scores: batch x local heads x queries x keys."""
        if not self.tensor_parallel:
            return self.symbol("batch seq full_seq", lambda c: c.tokens * c.full_seq, heads * factor)
        return self.symbol(f"batch ceil({heads}/tp) seq full_seq", lambda c: c.tokens * c.full_seq * ceil_div(heads, c.tp), factor)

    def mask(self) -> Size:
        """Queries x keys of one sequence."""
        return self.symbol("seq full_seq", lambda c: c.seq * c.full_seq)

    def padded_rows(self, heads: int, factor: int = 1) -> Size:
        """Statistics of memory-efficient attention: batch x local heads x queries rounded up to 32."""
        t = self.tensor_parallel
        name = f"batch {f'ceil({heads}/tp)' if t else heads} ceil(seq/32)*32"
        return self.symbol(name, lambda c: c.batch * (ceil_div(heads, c.tp) if t else heads) * (-(-c.seq // 32) * 32), factor)

    # parameters

    def local(self, w: Weight, factor: int = 1) -> Size:
        """A tensor after tensor and expert parallelism."""
        return self._weights([w], "local", local_elements, self, factor)

    def shard(self, ws: Sequence[Weight], factor: int = 1) -> Size:
        """Rank 0's shards of tensors (`shard_shape`)."""
        return self._weights(ws, "shard", shard_elements, self, factor)

    def padded(self, ws: Sequence[Weight], factor: int = 1) -> Size:
        """All ranks' shards together: what is cut on dimension 0 rounded up to a multiple of the ranks."""
        return self._weights(ws, "padded", padded_elements, self, factor)

    def optimizer(self, opt: Optimizer, ws: Sequence[Weight], stored: int, sharded: bool, matrix: bool) -> Size:
        """Optimizer states of a group of tensors, in bytes."""
        ws = tuple(ws)
        cut = "shards of " if sharded else ""
        name = f"{opt.name} states{' of matrices' if matrix else ''} of {cut}{self._words((w, 1) for w in ws)}"

        def value(c: Columns) -> IntColumn:
            total = np.zeros_like(c.batch)
            for w in ws:
                dims = owned_shape(w, c, sharded=sharded, tensor=self.splits(w) is not None)
                total = total + optimizer_state(opt, dims, stored, matrix=matrix)
            return total

        return self.symbol(name, value)

    def zero_redundancy(self, opt: Optimizer, ws: Sequence[Weight], stored: int) -> Size:
        """Rank 0's states under ZeroRedundancyOptimizer, which deals whole tensors, as tensor parallelism leaves them, over the ranks."""
        ws = tuple(ws)

        def value(c: Columns) -> IntColumn:
            total = np.zeros_like(c.batch)
            cut = c.shards << 32 | c.tp
            for pair in np.unique(cut):
                rows = np.flatnonzero(cut == pair)
                one = c.take(rows[:1])
                dims = [owned_shape(w, one, sharded=False, tensor=self.splits(w) is not None) for w in ws]
                mine = greedy_partition([int(product(d)[0]) for d in dims], int(pair >> 32))[0]
                total[rows] = sum(int(optimizer_state(opt, dims[i], stored)[0]) for i in mine)
            return total

        return self.symbol(f"{opt.name} states of rank 0 of ZeroRedundancyOptimizer", value)

    def _weights(self, ws: Iterable[Weight], how: str, count: Callable[..., IntColumn], symbols: Symbols, factor: int) -> Size:
        kinds: dict[tuple[tuple[int, ...], int | None, int | None], int] = {}
        rules: dict[tuple[tuple[int, ...], int | None, int | None], Weight] = {}
        for w in ws:
            key = (w.shape, symbols.splits(w), w.ep_dim)
            kinds[key] = kinds.get(key, 0) + 1
            rules[key] = w
        plain = how == "local" and all(k[1] is None and k[2] is None for k in kinds)
        if plain:
            return self.one(factor * sum(rules[k].elements * n for k, n in kinds.items()))
        name = f"{how}({self._words((rules[k], n) for k, n in kinds.items())})"

        def value(c: Columns) -> IntColumn:
            return sum((n * count(rules[k], c, k[1] is not None) for k, n in kinds.items()), np.zeros_like(c.batch))

        return self.symbol(name, value, factor)

    def _words(self, ws: Iterable[tuple[Weight, int]]) -> str:
        """Shapes as people read them, equal ones counted: ``2 [14336/tp, 4096] + [4096]``."""
        found: dict[str, int] = {}
        for w, n in ws:
            tp, ep = self.splits(w), w.ep_dim
            dims = (f"{d}{'/ep' * (i == ep)}{('/etp' if ep is not None else '/tp') * (i == tp)}" for i, d in enumerate(w.shape))
            word = f"[{', '.join(dims)}]"
            found[word] = found.get(word, 0) + n
        return " + ".join(f"{n} {word}" if n > 1 else word for word, n in found.items())

    def splits(self, w: Weight) -> int | None:
        """The dimension that tensor parallelism splits here, if it does."""
        if not self.tensor_parallel or (w.tp_needs_sp and not self.sequence_parallel):
            return None
        return w.tp_dim


def _piece(seq: IntColumn, i: int, of: int) -> IntColumn:
    length = -(-seq // of)
    return np.clip(seq - i * length, 0, length)


def _masked(whole: Symbol, test: Callable[[Columns], IntColumn]) -> Callable[[Columns], IntColumn]:
    return lambda c: whole.value(c) * test(c)


def local_shape(w: Weight, c: Columns, tensor: bool = True) -> list[IntColumn]:
    """Dimensions of a tensor on one rank after tensor (inside an expert: etp) and expert parallelism."""
    dims = [np.full_like(c.batch, d) for d in w.shape]
    if w.ep_dim is not None:
        dims[w.ep_dim] = ceil_div(dims[w.ep_dim], c.ep)
    if tensor and w.tp_dim is not None:
        dims[w.tp_dim] = ceil_div(dims[w.tp_dim], c.etp if w.ep_dim is not None else c.tp)
    return dims


def shards_of(w: Weight, c: Columns) -> IntColumn:
    """Ranks over which a tensor is cut: experts, which are spread over ep already, over the rest of them."""
    if w.ep_dim is None:
        return c.shards
    return np.maximum(1, c.shards * c.tp // np.maximum(1, c.ep * c.etp))


def _product(dims: Sequence[IntColumn]) -> IntColumn:
    total = dims[0]
    for d in dims[1:]:
        total = total * d
    return total


def local_elements(w: Weight, c: Columns, tensor: bool = True) -> IntColumn:
    return _product(local_shape(w, c, tensor))


def cut_within(w: Weight, c: Columns, tensor: bool = True) -> NDArray[np.bool_]:
    """Whether FSDP2 cuts a stack of fewer experts than shards on a later dimension, the first that divides (torchtitan's rule); else, as all, on the first."""
    rows, *rest = local_shape(w, c, tensor)
    shards = shards_of(w, c)
    return (rows < shards) & np.any([d % shards == 0 for d in rest], axis=0) if len(rest) > 1 else np.zeros(len(rows), dtype=bool)


def shard_shape(w: Weight, c: Columns, tensor: bool = True) -> list[IntColumn]:
    """Dimensions of rank 0's shard."""
    dims, shards, left = local_shape(w, c, tensor), shards_of(w, c), cut_within(w, c, tensor)
    dims[0] = np.where(left, dims[0], ceil_div(dims[0], shards))
    for d in range(1, len(dims)):
        here = left & (dims[d] % shards == 0)
        dims[d], left = np.where(here, dims[d] // shards, dims[d]), left & ~here
    return dims


def shard_elements(w: Weight, c: Columns, tensor: bool = True) -> IntColumn:
    return _product(shard_shape(w, c, tensor))


def padded_elements(w: Weight, c: Columns, tensor: bool = True) -> IntColumn:
    return shard_elements(w, c, tensor) * shards_of(w, c)


def owned_shape(w: Weight, c: Columns, *, sharded: bool, tensor: bool) -> list[IntColumn]:
    """Local dimensions on rank 0: after tensor and expert parallelism, and where `sharded` after FSDP2's cut."""
    return shard_shape(w, c, tensor) if sharded else local_shape(w, c, tensor)
