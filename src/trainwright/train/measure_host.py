"""What a CPU rank itself spends on sending: hooks and copies of FSDP2, DTensor's bookkeeping around split products, blocks of ring attention.

Measured as the seconds of the thread that runs the model, which waiting for a message does not lengthen, with a wrapper or a split less without it. What the
messages themselves take is measured apart (`measure_machine.collectives`). Every rank calls everything equally often, since each call is a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .context import Across
from .kernels import attend
from .modules import Context

Line = list[float]  # [seconds a call, seconds a byte]
ROUNDS = 16
ROWS, WIDTH, TENSORS = (8, 1024), 256, 12  # of a group of parameters: two sizes, as many tensors as a layer has
PASSES = 4
TOKENS, HIDDEN, MORE = (64, 16384), 64, 4  # of what split products send: narrow, so that the products take little
SEQUENCES, PART, HEADS, HEAD = (1, 64), 64, 4, 32  # of attention over a cut sequence: short, for the same reason


def least(works: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
    """Seconds of this thread for a call of each, in turns: the least of the rounds, the mean over ranks."""
    best = dict.fromkeys(works, math.inf)
    for i in range(ROUNDS + 1):
        for name, work in works.items():
            start = time.thread_time() - Cold.spent
            work()
            if i:  # the first call builds what later ones find
                best[name] = min(best[name], time.thread_time() - Cold.spent - start)
    total = torch.tensor(list(best.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(best, (total / dist.get_world_size()).tolist()))


def messages(kind: str, ranks: int) -> int:
    """That a `pair` of one column, or attention, sends forward and backward; a rank of a ring sends each of its parts alone."""
    return {"split": 2, "sequence": 4, "ring": 3 * ranks - 2, "allgather": 3, "ulysses": 8}[kind]


def line(sizes: tuple[float, float], taken: tuple[float, float]) -> Line:
    """Through two points; neither number is below zero."""
    each = max(0.0, (taken[1] - taken[0]) / (sizes[1] - sizes[0]))
    return [max(0.0, taken[0] - each * sizes[0]), each]


class Cold(torch.autograd.Function):
    """Identity that leaves the core's caches as a layer's products leave them, forward and backward: what is measured warm takes half as long."""

    swept = torch.zeros(2**21)  # no layer reads and writes less
    spent = 0.0  # by this, which is no part of what is measured

    @staticmethod
    def sweep() -> None:
        start = time.thread_time()
        Cold.swept.add_(1.0)
        Cold.spent += time.thread_time() - start

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Cold.sweep()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        Cold.sweep()
        return g


# ---- groups of FSDP2


class Untouched(torch.autograd.Function):
    """Identity on `x` that hands every weight a gradient and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.like = [w.shape for w in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g, *(torch.empty(s) for s in ctx.like)


class Holder(nn.Module):
    """Weights and no work."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(rows, WIDTH) for _ in range(TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Untouched.apply(x, *self.weights)


def passes(module: Any, count: int) -> Callable[[], None]:
    """`count` micro-batches, whose gradients are reduced in the last."""
    x = torch.zeros(1, requires_grad=True)

    def run() -> None:
        for i in range(count):
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(i == count - 1)
            Cold.apply(module(Cold.apply(x))).sum().backward()
        for p in module.parameters():
            p.grad = None

    return run


def wrapped(kind: str, rows: int, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    module = Holder(rows)
    if kind == "none":
        replicate(module, mesh=mesh)
    elif kind != "plain":
        fully_shard(module, mesh=mesh, reshard_after_forward=kind == "zero3")
    return module


def apart(one: float, many: float) -> tuple[float, float]:
    """(a pass, a reduction) from one pass and its reduction, and from `PASSES` and one; a reduction that seems to cost less than nothing is a pass's share."""
    each = (many - one) / (PASSES - 1)
    return (each, one - each) if each < one else (many / PASSES, 0.0)


def groups(mesh: DeviceMesh) -> dict[str, dict[str, Line]]:
    """{sharding: {each, reduce}}: gathering and giving back in every micro-batch, and every reduction; calls are groups, bytes those of the parameters."""
    kinds = ("plain", "none", "zero2", "zero3")
    modules = {(kind, rows): wrapped(kind, rows, mesh) for kind in kinds for rows in ROWS}
    taken = least({(*key, n): passes(module, n) for key, module in modules.items() for n in (1, PASSES)})
    more = {key: value - taken["plain", *key[1:]] for key, value in taken.items()}
    small, large = (4.0 * TENSORS * WIDTH * rows for rows in ROWS)
    found = {}
    for kind in kinds[1:]:
        parts = [apart(more[kind, rows, 1], more[kind, rows, PASSES]) for rows in ROWS]
        each, reduce = zip(*parts)
        found[kind] = {name: line((small, large), (a, b)) for name, (a, b) in (("each", each), ("reduce", reduce))}
    return found


# ---- split products


class Pair(nn.Module):
    """Products of columns and one of rows, as a layer has them: (batch, tokens, hidden) -> the same. Split, a rank has `HIDDEN` of the columns."""

    def __init__(self, columns: int, parts: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN * parts) for _ in range(columns))
        self.row = nn.Linear(HIDDEN * parts, HIDDEN)
        self.gather: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gather is not None:
            x = DTensor.from_local(x, self.gather, (Shard(1),), run_check=False).redistribute(self.gather, (Replicate(),))
        return self.row(Cold.apply(sum(column(Cold.apply(x)) for column in self.columns)))


def split(module: Pair, kind: str, mesh: DeviceMesh) -> None:
    rows = RowwiseParallel(output_layouts=Shard(1) if kind == "sequence" else Replicate())
    parallelize_module(module, mesh, {**{f"columns.{i}": ColwiseParallel() for i in range(len(module.columns))}, "row": rows})
    module.gather = mesh if kind == "sequence" else None


def pair(kind: str, columns: int, tokens: int, mesh: DeviceMesh) -> Callable[[], None]:
    """Forward and backward of a `Pair`: plain, split, or split with the sequence cut between its pairs."""
    n = 1 if kind == "plain" else mesh.size()
    module = Pair(columns, n)
    if kind != "plain":
        split(module, kind, mesh)
    x = torch.zeros(1, tokens // (n if kind == "sequence" else 1), HIDDEN, requires_grad=True)
    given = torch.zeros_like(x)

    def run() -> None:
        Cold.apply(module(Cold.apply(x))).backward(given)
        for p in module.parameters():
            p.grad = None

    return run


def products(mesh: DeviceMesh) -> dict[str, Any]:
    """{product_s, and by collective a line}: of a split product, and of a message that lays its input or output out anew."""
    cases = [(kind, columns, tokens) for kind in ("plain", "split", "sequence") for columns in (1, MORE) for tokens in TOKENS]
    taken = least({case: pair(*case, mesh) for case in cases})
    more = {case: value - taken["plain", *case[1:]] for case, value in taken.items()}
    # More columns gather nothing more; without the cut sequence each sums its own input's gradient.
    product = max(0.0, (more["sequence", MORE, TOKENS[0]] - more["sequence", 1, TOKENS[0]]) / (MORE - 1))
    sizes = 4.0 * HIDDEN * TOKENS[0], 4.0 * HIDDEN * TOKENS[1]
    laid = {}
    for kind in ("split", "sequence"):
        a, b = ((more[kind, 1, tokens] - 2 * product) / messages(kind, mesh.size()) for tokens in TOKENS)
        laid[kind] = line(sizes, (a, b))
    return {"product_s": product, "all_reduce": laid["split"], "all_gather": laid["sequence"], "reduce_scatter": laid["sequence"]}


def updates(mesh: DeviceMesh) -> float:
    """Seconds a tensor of what an optimizer's step takes longer for parameters that are DTensors."""

    def step(split: bool) -> Callable[[], object]:
        made = [torch.zeros(mesh.size(), 8) for _ in range(TENSORS)]
        weights = [nn.Parameter(distribute_tensor(t, mesh, (Shard(0),)) if split else t) for t in made]
        for p in weights:
            p.grad = torch.zeros_like(p)
        return torch.optim.AdamW(weights, lr=0.0, fused=True).step

    taken = least({split: step(split) for split in (False, True)})
    return max(0.0, taken[True] - taken[False]) / TENSORS


# ---- attention over a cut sequence


def attended(kind: str, batch: int, mesh: DeviceMesh) -> Callable[[], None]:
    """Forward and backward of attention: plain over whole sequences, or cut over the ranks."""
    n = mesh.size()
    core: Any = SimpleNamespace(op=SimpleNamespace(window=None), kind="flash")
    positions = Context(torch.zeros(1))
    shape = batch, HEADS * n, PART * n if kind == "plain" else PART, HEAD
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    given = torch.zeros(shape)
    across = Across(mesh.get_group(), mesh.get_local_rank(), n, kind)

    def run() -> None:
        made = Cold.apply(q), k, v
        out = attend(*made, "flash") if kind == "plain" else across.attend(*made, positions, core)
        torch.autograd.grad(Cold.apply(out), (q, k, v), given)

    return run


def attention(mesh: DeviceMesh) -> dict[str, Line]:
    """By collective, of every message of ring, gathered and head-wise attention: what merging blocks takes longer than a rank's share of plain attention."""
    n = mesh.size()
    taken = least({(kind, b): attended(kind, b, mesh) for kind in ("plain", "ring", "allgather", "ulysses") for b in SEQUENCES})
    found: dict[str, Line] = {}
    for kind, name, parts in (("ring", "send_recv", 2), ("allgather", "all_gather", 2 * n), ("ulysses", "all_to_all", 1)):
        size = 4.0 * HEADS * n * PART * HEAD * parts
        a, b = ((taken[kind, s] - taken["plain", s] / n) / messages(kind, n) for s in SEQUENCES)
        found[name] = line((size * SEQUENCES[0], size * SEQUENCES[1]), (a, b))
    return {**found, "reduce_scatter": found["all_gather"]}


def measure(ranks: int) -> dict[str, Any]:
    """All of it; nothing for one rank, which sends nothing."""
    if ranks == 1:
        return {}
    mesh = init_device_mesh("cpu", (ranks,))
    return {"groups": groups(mesh), "tp": products(mesh), "update_s": updates(mesh), "cp": attention(mesh)}
