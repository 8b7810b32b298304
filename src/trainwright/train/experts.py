"""Expert parallelism: each rank of the ep axis holds some of a layer's experts; tokens travel to them and back (arXiv:2006.16668)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..errors import SpecError
from .decoder import Decoder
from .modules import Experts


def apply(part: Decoder, mesh: DeviceMesh, capacity: float | None = None) -> None:
    """Every layer's experts cut over the mesh (dim 0 of their weights), as DTensors, so that checkpoints and norms see the whole.

    Without a `capacity` factor no token is dropped. Raises `SpecError` where the experts do not divide.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    for module in part.modules():
        if not isinstance(module, Experts):
            continue
        count = module.up_proj.weight.shape[0]
        if count % size:
            raise SpecError(
                f"{count} experts do not divide over {size} ranks", "strategy.ep", [n for n in range(1, count + 1) if count % n == 0]
            )
        for holder in module.children():
            whole = holder.weight
            mine = whole.detach().chunk(size)[rank].clone()
            holder.weight = nn.Parameter(DTensor.from_local(mine, mesh, (Shard(0),), run_check=False))
        module.route = Route(mesh.get_group(), size, count) if capacity is None else Capped(capacity, count, mesh.get_group(), size)


def limit(part: Decoder, capacity: float) -> None:
    """Every layer's experts, whole on this rank, with a capacity."""
    for module in part.modules():
        if isinstance(module, Experts):
            module.route = Capped(capacity, module.up_proj.weight.shape[0], None, 1)


class Exchange(torch.autograd.Function):
    """all_to_all of rows with different numbers for each rank; backward sends them home."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes = sent, received, group
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        out = g.new_empty((sum(sent), *g.shape[1:]))
        dist.all_to_all_single(out, g.contiguous(), sent, received, group=group)
        return out, None, None, None


class Route:
    """Dispatch, the local experts, combine: as many rows as the router asks for."""

    def __init__(self, group: dist.ProcessGroup, size: int, experts: int) -> None:
        self.group, self.size, self.experts = group, size, experts

    def __call__(self, module: Experts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(tokens, width), and (tokens, top_k) of weights and experts -> (tokens, width)."""
        order = experts.flatten().argsort(stable=True)
        rows = order // weights.shape[1]
        sent, received, each, regroup = self.exchanged(experts)
        arrived = Exchange.apply(x[rows], sent, received, self.group)
        made = module.run(arrived[regroup], each)
        back = torch.empty_like(regroup)
        back[regroup] = torch.arange(len(regroup), device=regroup.device)
        out = Exchange.apply(made[back], received, sent, self.group) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows, out)

    def exchanged(self, experts: torch.Tensor) -> tuple[list[int], list[int], list[int], torch.Tensor]:
        """(tokens, top_k) -> rows sent to each rank, received from each, for each local expert; and the order of what arrives by expert."""
        counts = experts.flatten().bincount(minlength=self.experts).view(self.size, -1)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        # All that the host must know, in one copy from the device.
        sizes = torch.cat((counts.sum(1), coming.sum(1), coming.sum(0))).tolist()
        return sizes[: self.size], sizes[self.size : 2 * self.size], sizes[2 * self.size :], self._by_expert(coming)

    def _by_expert(self, coming: torch.Tensor) -> torch.Tensor:
        """Rows that arrived by rank, then expert -> the order by expert, then rank."""
        which = torch.repeat_interleave(torch.arange(coming.numel(), device=coming.device), coming.flatten())
        local = coming.shape[1]
        by_expert = (which % local) * coming.shape[0] + which // local
        return by_expert.argsort(stable=True)


class Capped:
    """Dispatch, the local experts, combine with room for ceil(factor x tokens x top_k / experts) rows an expert, of this rank's tokens of one pass; first
    come, first served, what is over is dropped and lives on in the residual alone (GShard, arXiv:2006.16668 §2.2; Switch, arXiv:2101.03961 §2.2).

    All shapes are known beforehand, so the host waits for nothing; unused room travels as zeros, as in Megatron's ``--moe-pad-expert-input-to-capacity``.
    """

    def __init__(self, factor: float, experts: int, group: dist.ProcessGroup | None, size: int) -> None:
        self.factor, self.experts, self.group, self.size = factor, experts, group, size

    def __call__(self, module: Experts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(tokens, width), and (tokens, top_k) of weights and experts -> (tokens, width)."""
        (tokens, width), top_k = x.shape, experts.shape[1]
        room = math.ceil(self.factor * tokens * top_k / self.experts)
        slot = places(experts, self.experts, room)
        taken = x.new_zeros(self.experts * room + 1, width).index_copy(0, slot, x.repeat_interleave(top_k, 0))
        arrived = self._swap(taken[:-1]).view(self.size, -1, room, width).transpose(0, 1).flatten(1, 2)
        made = module.run_even(arrived).unflatten(1, (self.size, room)).transpose(0, 1).reshape(-1, width)
        back = torch.cat((self._swap(made), made.new_zeros(1, width)))
        return (back[slot] * weights.reshape(-1, 1)).view(tokens, top_k, width).sum(1)

    def _swap(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x
        each = [len(x) // self.size] * self.size
        return Exchange.apply(x, each, each, self.group)


def places(experts: torch.Tensor, count: int, room: int) -> torch.Tensor:
    """(tokens, top_k) of chosen experts -> for each (token, choice), in order, the row it has among `count` x `room`; the row after all where there is none."""
    chosen = experts.flatten()
    before = F.one_hot(chosen, count).cumsum(0).gather(1, chosen.unsqueeze(1)).squeeze(1) - 1
    return torch.where(before < room, chosen * room + before, count * room)
