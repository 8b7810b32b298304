"""Context parallelism: each rank of the cp axis holds part of every sequence, and attention brings queries and keys together again.

* ``ring``: keys and values travel round the ring, partial results are merged by their log-sum-exp (arXiv:2310.01889;
  one flash kernel a step where the machine has it); in backward their gradients
  travel with them.
  Ranks hold the pieces r and 2n-1-r of 2n, so that causal work is even (arXiv:2309.14509, Llama 3's report §3.3.2).
* ``allgather``: keys and values are gathered, and once more in backward (Llama 3's report §3.3.2); queries stay, and meet the same blocks as in a ring.
* ``ulysses``: an all-to-all makes whole sequences of some heads of it (arXiv:2309.14509); heads divide over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import SpecError
from ..resolve import Run
from . import fused
from .data.batches import Batch
from .decoder import Decoder
from .kernels import attend, documents_mask
from .mesh import Ranks
from .modules import Context, Core

# PyTorch 2.13 renames them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LOWEST = -1e30  # stands for -inf where a difference of two of them would be no number


def index_of(rank: int, size: int, tokens: int, kind: str) -> torch.Tensor:
    """Places in the whole sequence, of `tokens`, that a rank holds, in order."""
    if kind == "ulysses":
        return torch.arange(tokens).chunk(size)[rank]
    pieces = torch.arange(tokens).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def cut(batch: Batch, run: Run, ranks: Ranks) -> Batch:
    """This rank's part of every sequence."""
    size = ranks.size("cp")
    if size == 1:
        return batch
    index = index_of(ranks.rank("cp"), size, batch.tokens.shape[1], run.plan.structure.cp_kind).to(batch.tokens.device)
    take = lambda x: x.index_select(1, index).contiguous()  # noqa: E731
    return Batch(take(batch.tokens), take(batch.labels), take(batch.positions), None if batch.documents is None else take(batch.documents))


def apply(part: Decoder, run: Run, ranks: Ranks) -> None:
    """Every attention core of the part works over the cp axis. Raises `SpecError` where the sequence or the heads do not divide."""
    size, kind, tokens = ranks.size("cp"), run.plan.structure.cp_kind, run.job.seq_len
    pieces = size if kind == "ulysses" else 2 * size
    if tokens % pieces:
        raise SpecError(f"{tokens} tokens do not divide into {pieces} pieces", "training.seq_len", [tokens // pieces * pieces or pieces])
    local_heads = run.model.kv_heads // ranks.size("tp")
    if kind == "ulysses" and local_heads % size:
        raise SpecError(f"{local_heads} key-value heads a rank do not divide over {size}", "strategy.cp", ["ring"])
    across = Across(ranks.group("cp"), ranks.rank("cp"), size, kind)
    part.gathers_documents = across.documents
    for module in part.modules():
        if isinstance(module, Core):
            core = module
            module.kernel = lambda q, k, v, context, core=core: across.attend(q, k, v, context, core)


class Across:
    """The cp group and its kind of attention."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, kind: str) -> None:
        self.group, self.rank, self.size, self.kind = group, rank, size, kind

    def documents(self, documents: torch.Tensor) -> torch.Tensor:
        """(size, batch, tokens of a rank): every rank's."""
        found = documents.new_empty((self.size, *documents.shape))
        all_gather(found.flatten(0, 1), documents.contiguous(), group=self.group)
        return found

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, core: Core) -> torch.Tensor:
        total = q.shape[2] * self.size
        indices = [index_of(r, self.size, total, self.kind).to(q.device) for r in range(self.size)]
        window = core.op.window
        if self.kind != "ulysses":
            return Blocks.apply(q, k, v, self, indices, context.everywhere, window, core.kind)
        q, k, v = (Heads.apply(x, self) for x in (q, k, v))
        mask = None if context.everywhere is None else documents_mask(torch.cat(tuple(context.everywhere), 1))
        return Sequence.apply(attend(q, k, v, core.kind, mask, window), self)


def _allowed(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    back = queries.unsqueeze(1) - keys.unsqueeze(0)
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _swap(x: torch.Tensor, across: Across) -> torch.Tensor:
    """all_to_all over the first dim, whose size is the group's."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=across.group)
    return out


def _to_heads(x: torch.Tensor, n: Across) -> torch.Tensor:
    """(batch, heads, part, d) -> (batch, heads / n, whole, d)."""
    b, h, s, d = x.shape
    swapped = _swap(x.view(b, n.size, h // n.size, s, d).transpose(0, 1), n)
    return swapped.permute(1, 2, 0, 3, 4).reshape(b, h // n.size, n.size * s, d)


def _to_sequence(x: torch.Tensor, n: Across) -> torch.Tensor:
    """(batch, heads / n, whole, d) -> (batch, heads, part, d)."""
    b, h, s, d = x.shape
    swapped = _swap(x.view(b, h, n.size, s // n.size, d).permute(2, 0, 1, 3, 4), n)
    return swapped.transpose(0, 1).reshape(b, n.size * h, s // n.size, d)


class Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, across: Across) -> torch.Tensor:
        ctx.across = across
        return _to_heads(x, across)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_sequence(g, ctx.across), None


class Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, across: Across) -> torch.Tensor:
        ctx.across = across
        return _to_sequence(x, across)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(g, ctx.across), None


class Block(NamedTuple):
    """What this rank's queries see of another's keys: which rows of each, and whether they are ordered among themselves (the rank's own)."""

    rows: slice
    keys: slice
    causal: bool


def block_of(here: int, source: int, tokens: int) -> Block:
    """Of pieces (r, 2n-1-r) each rank's second comes after every first piece: keys of an earlier rank are seen half, by all queries; keys of a later
    rank whole, by the second half of the queries. So every step but the first is half a square, without a mask."""
    half, whole = tokens // 2, slice(0, tokens)
    if source == here:
        return Block(whole, whole, True)
    return Block(whole, slice(0, half), False) if source < here else Block(slice(half, tokens), whole, False)


def _visits(kv: torch.Tensor, across: Across) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its keys and values) of every rank, this one's first: passed on n - 1 times round the ring, or gathered at once."""
    sources = [(across.rank - step) % across.size for step in range(across.size)]
    if across.kind == "allgather":
        every = kv.new_empty((across.size, *kv.shape))
        all_gather(every.flatten(0, 1), kv.contiguous(), group=across.group)
        yield from ((source, every[source]) for source in sources)
        return
    for source in sources:
        coming = _pass_on(kv, across) if source != sources[-1] else None
        yield source, kv
        if coming is not None:
            kv = coming()


class Returns:
    """Gradients of every rank's keys and values on their way to it: sums that travel round the ring behind the keys, n times, or scattered at the end."""

    def __init__(self, kv: torch.Tensor, across: Across) -> None:
        self.across, self.gathers, self.dtype = across, across.kind == "allgather", kv.dtype
        self.sums = torch.zeros((across.size, *kv.shape) if self.gathers else kv.shape, dtype=torch.float32, device=kv.device)
        self.coming: Callable[[], torch.Tensor] | None = None

    def add(self, source: int, keys: slice, gradient: torch.Tensor) -> None:
        if self.gathers:
            self.sums[source][:, :, keys] += gradient
            return
        if self.coming is not None:  # sums for these keys, made by the ranks that had them before
            self.sums = self.coming()
        self.sums[:, :, keys] += gradient
        self.coming = _pass_on(self.sums, self.across)

    def mine(self) -> torch.Tensor:
        if self.coming is not None:
            return self.coming()
        out = self.sums.new_empty(self.sums.shape[1:], dtype=self.dtype)
        reduce_scatter(out, self.sums.to(self.dtype).flatten(0, 1), group=self.across.group)
        return out


class Blocks(torch.autograd.Function):
    """softmax(q k^T) v, block by block as keys and values come (`_visits`), whose gradients go back (`Returns`). Sums are in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        across: Across,
        indices: list[torch.Tensor],
        documents: torch.Tensor | None,
        window: int | None,
        kind: str,
    ) -> torch.Tensor:
        ctx.across, ctx.indices, ctx.documents, ctx.window = across, indices, documents, window
        ctx.fused = kind == "flash" and documents is None and window is None and fused.fits(q, v)
        kv = torch.cat((k, v), -1)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
        total = torch.full((*q.shape[:-1], 1), float("-inf"), dtype=torch.float32, device=q.device)
        for source, other in _visits(kv, across):
            rows, keys, causal = block_of(across.rank, source, q.shape[2])
            keys_in, values_in = other[:, :, keys].split((k.shape[-1], v.shape[-1]), -1)
            if ctx.fused:
                part, high = fused.forward(q[:, :, rows], keys_in, values_in, causal)
            else:
                scores = _scores(q[:, :, rows], keys_in, _mask(ctx, source, rows, keys))
                high = scores.logsumexp(-1, keepdim=True)
                part = torch.matmul(torch.exp(scores - high.clamp(min=LOWEST)), _repeat(values_in, q).float())
            before = total[:, :, rows]
            new = torch.logaddexp(before, high)
            safe = new.clamp(min=LOWEST)
            out[:, :, rows] = out[:, :, rows] * torch.exp(before - safe) + part * torch.exp(high - safe)
            total[:, :, rows] = new
        made = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, made, total)
        return made

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, total = ctx.saved_tensors
        across, widths = ctx.across, (k.shape[-1], v.shape[-1])
        delta = None if ctx.fused else (g.float() * out.float()).sum(-1, keepdim=True)
        dq = torch.zeros_like(q, dtype=torch.float32)
        kv = torch.cat((k, v), -1)
        returns = Returns(kv, across)
        for source, other in _visits(kv, across):
            rows, keys, causal = block_of(across.rank, source, q.shape[2])
            keys_in, values_in = other[:, :, keys].split(widths, -1)
            given = g[:, :, rows], q[:, :, rows], keys_in, values_in
            if delta is None:
                parts = fused.backward(*given, out[:, :, rows], total[:, :, rows], causal)
            else:
                parts = _block_backward(*given, delta[:, :, rows], total[:, :, rows], _mask(ctx, source, rows, keys))
            dq[:, :, rows] += parts[0]
            returns.add(source, keys, torch.cat(parts[1:], -1))
        dk, dv = returns.mine().split(widths, -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _block_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, total: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys, values in fp32 by the softmax's rule; `delta` is the sum of gradient x result, `total` the whole row's log-sum-exp."""
    p, wide = torch.exp(_scores(q, k, mask) - total), g.float()
    keys, values = (_repeat(x, q).float() for x in (k, v))
    ds = p * (torch.matmul(wide, values.transpose(2, 3)) - delta) * q.shape[-1] ** -0.5
    return torch.matmul(ds, keys), _fold(torch.matmul(ds.transpose(2, 3), q.float()), k), _fold(torch.matmul(p.transpose(2, 3), wide), v)


def _pass_on(x: torch.Tensor, across: Across) -> Any:
    """Sends to the next rank of the ring and takes from the one before; call the result to wait."""
    ranks = dist.get_process_group_ranks(across.group)
    out = torch.empty_like(x)
    to, source = ranks[(across.rank + 1) % across.size], ranks[(across.rank - 1) % across.size]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x.contiguous(), to, across.group), dist.P2POp(dist.irecv, out, source, across.group)]
    )

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return out

    return wait


def _mask(ctx: Any, source: int, rows: slice, keys: slice) -> torch.Tensor:
    """(batch or 1, 1, queries, keys) of these rows of this rank's queries and of another's keys."""
    here = ctx.across.rank
    found = _allowed(ctx.indices[here][rows], ctx.indices[source][keys], ctx.window)[None, None]
    if ctx.documents is None:
        return found
    return found & (ctx.documents[here][:, rows].unsqueeze(2) == ctx.documents[source][:, keys].unsqueeze(1)).unsqueeze(1)


def _repeat(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _fold(g: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradients of repeated key-value heads summed."""
    groups = g.shape[1] // like.shape[1]
    return g if groups == 1 else g.unflatten(1, (like.shape[1], groups)).sum(2)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = torch.matmul(q.float(), _repeat(k, q).float().transpose(2, 3)) * q.shape[-1] ** -0.5
    return found.masked_fill(~mask, float("-inf"))
