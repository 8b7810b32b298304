"""The modules of single operations: norms, the core of attention, routers, experts, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from ..spec.blocks import Op
from .config import Numbers
from .kernels import attend

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass
class Context:
    """What every operation of a pass may ask for. `positions` (batch, tokens); `documents` (batch, tokens) or None; `tables` the rotary cos and sin."""

    positions: torch.Tensor
    documents: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    everywhere: torch.Tensor | None = None  # the documents of every rank of a context-parallel group


Shared = Callable[[str, torch.Tensor], torch.Tensor]  # a weight's name and the weight, as it is to be used: see `reduce.Sums`


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, cast back, times the weight; over the last dim."""

    shared: Shared | None = None

    def __init__(self, width: int, eps: float, **made: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width, **made)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        weight = self.weight if self.shared is None else self.shared("weight", self.weight)
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """PyTorch's, whose parameters may be `shared` as well."""

    shared: Shared | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = (("weight", self.weight), ("bias", self.bias))
        weight, bias = (p if p is None or self.shared is None else self.shared(name, p) for name, p in named)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Core(nn.Module):
    """softmax(q k^T) v; a module of its own so that it can be recomputed, or replaced by context parallelism (`kernel`)."""

    def __init__(self, op: Op, kind: str) -> None:
        super().__init__()
        self.op, self.kind = op, kind
        self.kernel: Callable[..., torch.Tensor] | None = None  # context parallelism's

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        """(batch, tokens, width) of each -> (batch, tokens, heads x head_dim); the heads are those of this rank."""
        d, dv = self.op.head_dim, self.op.v_head_dim or self.op.head_dim
        q, k, v = (x.unflatten(-1, (-1, n)).transpose(1, 2) for x, n in ((q, d), (k, d), (v, dv)))
        out = self.kernel(q, k, v, context) if self.kernel else attend(q, k, v, self.kind, context.mask, self.op.window)
        return out.transpose(1, 2).flatten(2)


class Balance(torch.autograd.Function):
    """Identity on the routing weights, which adds `weight` x the balance loss to whatever is differentiated (as Megatron's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight, ctx.like = weight, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.weight), None


def balance_loss(probabilities: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """E x the sum over the E experts of (share of the choices) x (mean probability), 1 where even; (tokens, E), (tokens, top_k).

    arXiv:2101.03961, equations 4 to 6, for any top_k as in Megatron.
    """
    count = probabilities.shape[1]
    share = F.one_hot(experts.flatten(), count).to(probabilities.dtype).mean(0)
    return count * (share * probabilities.mean(0)).sum()


class Router(nn.Module):
    """Scores of all experts, and the `top_k` chosen with their weights. `balance`: what the balance loss of a pass counts in its gradients."""

    shared: Shared | None = None
    balance: float = 0.0

    def __init__(self, op: Op, numbers: Numbers, **made: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(op.experts, op.k, **made))
        self.top_k, self.numbers = op.top_k, numbers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, width) -> weights and experts, both (tokens, top_k)."""
        weight = self.weight if self.shared is None else self.shared("weight", self.weight)
        probabilities = F.softmax(F.linear(x, weight), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.numbers.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.balance and torch.is_grad_enabled():
            weights = Balance.apply(weights, balance_loss(probabilities, experts), self.balance)
        return weights.to(x.dtype), experts


class Experts(nn.Module):
    """The expert products of a layer between dispatch and combine: ``gate``, ``up``, ``down`` of (experts, out, in)."""

    def __init__(self, rows: dict[str, Op], numbers: Numbers, **made: Any) -> None:
        super().__init__()
        self.function = next((o.function for o in rows.values() if o.kind == "activation"), "silu")
        for op in rows.values():
            if op.kind == "grouped_linear":
                holder = nn.Module()
                holder.weight = nn.Parameter(torch.empty(op.weights[0].shape, **made))
                setattr(self, op.name, holder)
        self.route: Callable[..., torch.Tensor] | None = None  # expert parallelism's

    def counts(self, experts: torch.Tensor) -> list[int]:
        """How many rows each expert gets of (tokens, top_k) choices."""
        return list(experts.flatten().bincount(minlength=self.up_proj.weight.shape[0]).tolist())

    def _local(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name).weight
        return (weight.to_local() if isinstance(weight, DTensor) else weight).to(x.dtype)

    def run(self, x: torch.Tensor, counts: Iterable[int]) -> torch.Tensor:
        """Tokens sorted by expert, (rows, width) with `counts` rows for each local expert -> (rows, width)."""
        act, made = ACTIVATIONS[self.function], []
        up, down = self._local("up_proj", x), self._local("down_proj", x)
        gate = self._local("gate_proj", x) if hasattr(self, "gate_proj") else None
        for i, piece in enumerate(x.split(list(counts))):
            h = act(F.linear(piece, gate[i])) * F.linear(piece, up[i]) if gate is not None else act(F.linear(piece, up[i]))
            made.append(F.linear(h, down[i]))
        return torch.cat(made)

    def run_even(self, x: torch.Tensor) -> torch.Tensor:
        """(local experts, rows, width), as many rows for each -> the same shape, in one batched product a weight."""
        act = ACTIVATIONS[self.function]
        up, down = (self._local(name, x).transpose(1, 2) for name in ("up_proj", "down_proj"))
        if hasattr(self, "gate_proj"):
            return torch.bmm(act(torch.bmm(x, self._local("gate_proj", x).transpose(1, 2))) * torch.bmm(x, up), down)
        return torch.bmm(act(torch.bmm(x, up)), down)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width), and (all tokens, top_k) of weights and experts -> (batch, tokens, width)."""
        flat = x.flatten(0, -2)
        if self.route is not None:
            return self.route(self, flat, weights, experts).view_as(x)
        order = experts.flatten().argsort(stable=True)
        rows = order // weights.shape[1]
        out = self.run(flat[rows], self.counts(experts)) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, rows, out).view_as(x)


def rotate(x: torch.Tensor, head_dim: int, tables: tuple[torch.Tensor, torch.Tensor] | None, numbers: Numbers) -> torch.Tensor:
    """Rotary positions in the halves' order of transformers: (a, b) -> (a cos - b sin, b cos + a sin)."""
    if tables is None:
        raise SpecError("no rotary tables were made", "positions")
    cos, sin = (t.to(x.dtype) for t in tables)
    heads = x.unflatten(-1, (-1, head_dim))
    whole = cos.shape[-1] == head_dim
    turned = heads if whole else heads[..., : cos.shape[-1]]
    a, b = turned.chunk(2, dim=-1)
    out = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return (out if whole else torch.cat((out, heads[..., cos.shape[-1] :]), dim=-1)).flatten(-2)
