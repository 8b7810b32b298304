"""Optimizers over whatever mix of tensors a layout leaves, the norm of the whole gradient, and fp32 masters of 16-bit weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ..errors import SpecError
from ..resolve import Run
from .mesh import Ranks
from .settings import Settings

with (
    warnings.catch_warnings()
):  # its module still compiles functional optimizers with torch.jit.script, which torch itself calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

Named = list[tuple[str, nn.Parameter]]


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def settle(p: nn.Parameter) -> None:
    """The gradient laid out as its weight is: a table that tensor parallelism splits gets its gradient whole from backward."""
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        p.grad = p.grad.redistribute(p.device_mesh, p.placements)


def _kind(p: torch.Tensor) -> Any:
    """Tensors that one fused call may take together."""
    return (p.device_mesh, p.device.type) if isinstance(p, DTensor) else p.device.type


def groups(named: Named, settings: Settings) -> list[dict[str, Any]]:
    """Matrices with decay, the rest without; apart by mesh, since fused kernels refuse a mix."""
    found: dict[Any, dict[str, Any]] = {}
    for name, p in named:
        decay = p.dim() > 1
        group = found.setdefault((decay, _kind(p)), {"params": [], "names": [], "weight_decay": settings.weight_decay if decay else 0.0})
        group["params"].append(p)
        group["names"].append(name)
    return [{k: v for k, v in g.items() if k != "names"} for g in found.values()]


def make(run: Run, named: Named, settings: Settings, ranks: Ranks, notes: list[str]) -> torch.optim.Optimizer:
    """The plan's optimizer; what was chosen otherwise is added to `notes`. Raises `SpecError` for those that are only planned here."""
    kernel = run.job.optimizer_kernel
    fast = {"fused": kernel == "fused", "foreach": kernel == "foreach"}
    adam = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.eps, **fast}
    if run.plan.structure.sharding == "zero1":
        if run.job.optimizer != "adamw":
            raise SpecError("ZeroRedundancyOptimizer runs here with AdamW", "strategy.sharding", ["zero2", "zero3"])
        return SplitStates(named, settings, ranks.data.get_group(), adam)
    if kernel == "fused" and run.job.optimizer.startswith("sgd") and any(isinstance(p, DTensor) for _, p in named):
        notes.append("PyTorch's fused SGD takes no sharded weights: foreach runs instead")
        fast = {"fused": False, "foreach": True}
    match run.job.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups(named, settings), **adam)
        case "sgd":
            return torch.optim.SGD(groups(named, settings), lr=settings.learning_rate, **fast)
        case "sgd_momentum":
            return torch.optim.SGD(groups(named, settings), lr=settings.learning_rate, momentum=settings.momentum, **fast)
        case "adafactor":
            return torch.optim.Adafactor(groups(named, settings), lr=settings.learning_rate)
        case "muon":
            return Muon(named, settings, adam)
    raise SpecError(f"{run.job.optimizer} can be planned, not run here yet", "training.optimizer", ["adamw", "sgd", "sgd_momentum", "muon"])


class SplitStates(ZeroRedundancyOptimizer):
    """PyTorch's ZeRO-1. What tensor parallelism splits is given to it as this rank's part, whose storage the weight shares."""

    def __init__(self, named: Named, settings: Settings, group: dist.ProcessGroup, adam: dict[str, Any]) -> None:
        self.locals = [(p, nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p) for _, p in named]
        self.part_of = {id(p): mine for p, mine in self.locals}
        parts = [(name, mine) for (name, _), (_, mine) in zip(named, self.locals)]
        super().__init__(groups(parts, settings), optimizer_class=torch.optim.AdamW, process_group=group, **adam)

    def owns(self, p: nn.Parameter) -> bool:
        """Whether this rank steps on the weight."""
        return bool(self._param_to_rank[self.part_of[id(p)]] == self.rank)

    def step(self, closure: Any = None, **more: Any) -> None:
        self.step_mine()
        self.share()

    def step_mine(self) -> None:
        """The weights that this rank owns and that have a gradient."""
        split = [(p, mine) for p, mine in self.locals if mine is not p]
        for p, mine in split:
            mine.grad = None if p.grad is None else local(p.grad)
        self._local_step()
        for _, mine in split:
            mine.grad = None

    def share(self) -> None:
        """Every rank gets what each has stepped on."""
        self._sync_params()


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by five Newton-Schulz steps (Jordan et al., 2024) for the layers' matrices; AdamW for the rest.

    The step of an (m, n) matrix is scaled by 0.2 sqrt(max(m, n)), so that its size is AdamW's (arXiv:2502.16982). A sharded gradient is gathered for the
    iteration and each rank keeps its part. A layer's experts are a stack (experts, m, n) of matrices: a cut between them splits none and is not gathered.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(self, named: Named, settings: Settings, adam: dict[str, Any]) -> None:
        matrices = [(n, p) for n, p in named if p.dim() >= 2 and ".layers." in f".{n}"]
        ids = {id(p) for _, p in matrices}
        self.adam = torch.optim.AdamW(groups([(n, p) for n, p in named if id(p) not in ids], settings), **adam)
        made = groups(matrices, settings)
        super().__init__(made, {"lr": settings.learning_rate, "momentum": settings.momentum})
        self.mine = list(self.param_groups)
        self.param_groups.extend(self.adam.param_groups)  # one learning rate moves both
        self.state.update(self.adam.state)
        self.adam.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.mine:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = self._orthogonal(p.grad + group["momentum"] * buffer)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))
        self.adam.step()

    def _orthogonal(self, g: torch.Tensor) -> torch.Tensor:
        if not isinstance(g, DTensor):
            return self._iterated(g)
        apart = [place if g.dim() > 2 and getattr(place, "dim", None) == 0 else Replicate() for place in g.placements]
        mine = self._iterated(g.redistribute(placements=apart).to_local())
        whole = DTensor.from_local(mine, g.device_mesh, apart, run_check=False, shape=g.shape, stride=g.stride())
        return whole.redistribute(placements=g.placements)

    def _iterated(self, g: torch.Tensor) -> torch.Tensor:
        """(..., m, n) -> the same, each matrix near the closest orthogonal one."""
        x = g.float()
        x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        a, b, c = self.COEFFICIENTS
        for _ in range(5):
            s = x @ x.mT
            x = a * x + (b * s + c * s @ s) @ x
        return x.mT if tall else x


class Masters:
    """fp32 copies of 16-bit weights: the optimizer steps on the copies, the weights follow.

    It steps on a few at a time, so that no more than these have gradients in fp32: all of them would be a quarter of what masters and AdamW's states take.
    """

    PIECES = 16  # each costs a pass over all parameters in Python

    def __init__(self, named: Named) -> None:
        self.weights = [p for _, p in named]
        self.named: Named = [(n, nn.Parameter(p.detach().float())) for n, p in named]
        pairs = list(zip(self.weights, (m for _, m in self.named)))
        most = max(sum(p.numel() for p in self.weights) // self.PIECES, 1)
        self.pieces: list[list[tuple[nn.Parameter, nn.Parameter]]] = []
        room = 0
        for pair in pairs:
            room -= pair[0].numel()
            if room < 0:
                self.pieces.append([])
                room = most - pair[0].numel()
            self.pieces[-1].append(pair)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        split = optimizer if isinstance(optimizer, SplitStates) else None
        for piece in self.pieces:
            mine = [(w, m) for w, m in piece if w.grad is not None and (split is None or split.owns(m))]
            for w, m in mine:
                assert w.grad is not None
                m.grad = w.grad.float()
            if split is None:
                optimizer.step()
            else:
                split.step_mine()
            for _, m in mine:
                m.grad = None
        if split is not None:
            split.share()
        self.give()

    @torch.no_grad()
    def give(self) -> None:
        for w, (_, m) in zip(self.weights, self.named):
            w.copy_(m)


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks, extra: Sequence[str] = ("pp",)) -> torch.Tensor:
    """The 2-norm of the whole gradient, the same on every rank: squares are summed over every axis that splits a tensor, and over pipeline stages."""
    device = ranks.machine.device
    sums: dict[str, torch.Tensor] = {}  # by the axes that split a tensor, whose names all ranks sort alike
    groups: dict[str, list[dist.ProcessGroup]] = {}
    for p in parameters:
        g = p.grad
        if g is None:
            continue
        found = [(a, ranks.group(a)) for a in getattr(p, "split_axes", ())]  # plain tensors of which each rank holds another part (experts)
        if isinstance(g, DTensor):
            names = g.device_mesh.mesh_dim_names or ()
            found += [(names[i], g.device_mesh.get_group(i)) for i, place in enumerate(g.placements) if not place.is_replicate()]
        key = ", ".join(name for name, _ in found)
        groups[key] = [group for _, group in found]
        square = torch.linalg.vector_norm(local(g), dtype=torch.float32).square().to(device)
        sums[key] = sums[key] + square if key in sums else square
    total = torch.zeros((), device=device)
    for key in sorted(sums):
        for group in groups[key]:
            dist.all_reduce(sums[key], group=group)
        total = total + sums[key]
    for axis in extra:
        if ranks.size(axis) > 1:
            dist.all_reduce(total, group=ranks.group(axis))
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | torch.Tensor) -> None:
    for p in parameters:
        if p.grad is not None:
            local(p.grad).mul_(factor)
