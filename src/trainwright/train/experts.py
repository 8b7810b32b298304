"""Expert parallelism: each rank of the ep axis holds some of a layer's experts; tokens travel to them and back (arXiv:2006.16668)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..errors import SpecError
from .modules import Decoder, Experts


def apply(part: Decoder, mesh: DeviceMesh) -> None:
    """Every layer's experts cut over the mesh (dim 0 of their weights), as DTensors, so that checkpoints and norms see the whole."""
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
        module.route = Route(mesh.get_group(), size, count)


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
    """Dispatch, the local experts, combine."""

    def __init__(self, group: dist.ProcessGroup, size: int, experts: int) -> None:
        self.group, self.size, self.experts = group, size, experts

    def __call__(self, module: Experts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(tokens, width), and (tokens, top_k) of weights and experts -> (tokens, width)."""
        order = experts.flatten().argsort(stable=True)
        rows = order // weights.shape[1]
        counts = experts.flatten().bincount(minlength=self.experts).view(self.size, -1)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
        arrived = Exchange.apply(x[rows], sent, received, self.group)
        regroup = self._by_expert(coming)
        made = module.run(arrived[regroup], coming.sum(0).tolist())
        back = torch.empty_like(regroup)
        back[regroup] = torch.arange(len(regroup), device=regroup.device)
        out = Exchange.apply(made[back], received, sent, self.group) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows, out)

    def _by_expert(self, coming: torch.Tensor) -> torch.Tensor:
        """Rows that arrived by rank, then expert -> the order by expert, then rank."""
        which = torch.repeat_interleave(torch.arange(coming.numel(), device=coming.device), coming.flatten())
        local = coming.shape[1]
        by_expert = (which % local) * coming.shape[0] + which // local
        return by_expert.argsort(stable=True)
