"""What of a trainer is kept, under names that no layout changes: ``model.NAME`` and ``optimizer.NAME.KIND``, each a tensor or a DTensor that knows its whole.

The tensors are the trainer's own: loading into them is loading the trainer. A weight that several ranks or stages hold is one name; with fp32 masters the
master is the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from .decoder import build

if TYPE_CHECKING:
    from .step import Trainer


def tied_name(trainer: Trainer) -> str | None:
    """The name of the embedding that a tied head shares, where the head is a tensor of its own (on another pipeline stage)."""
    model = trainer.run.model
    if not model.tied or trainer.run.plan.pp == 1:
        return None
    with torch.device("meta"):
        first = build(model, layers=(), first=True, last=False)
    return next(n for n, p in first.named_parameters() if p.shape[0] == model.vocab)


def weights(trainer: Trainer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, what is kept, what the optimizer knows it by) of every weight of this rank; copies of a weight have its name."""
    tied = tied_name(trainer)
    masters = trainer.masters.named if trainer.masters else trainer.named
    names = [
        tied if tied and n.startswith("head.") and p.dim() > 1 and p.shape[0] == trainer.run.model.vocab else n for n, p in trainer.named
    ]
    parts = {id(p): mine for p, mine in getattr(trainer.optimizer, "locals", ())}  # ZeRO-1 beside tensor parallelism
    return [(n, m, parts.get(id(m), m)) for n, (_, m) in zip(names, masters)]


def states_of(trainer: Trainer) -> Any:
    """The optimizer's state by parameter; of ZeroRedundancyOptimizer what this rank owns."""
    return getattr(trainer.optimizer, "optim", trainer.optimizer).state


def key(name: str, kind: str | None = None) -> str:
    """What a weight, or a kind of its optimizer state, is called in a checkpoint."""
    return f"model.{name}" if kind is None else f"optimizer.{name}.{kind}"


def everything(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    states = states_of(trainer)
    for name, kept, known in weights(trainer):
        found.append((key(name), kept.detach()))
        if known in states:
            found += [(key(name, kind), as_part(v, kept)) for kind, v in states[known].items() if isinstance(v, torch.Tensor)]
    return found


def as_part(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The state of this rank's part of a split weight, as the part that it is."""
    if not isinstance(weight, DTensor) or isinstance(state, DTensor) or state.dim() == 0:
        return state
    return DTensor.from_local(state, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride())


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What is saved, and what is loaded into."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in everything(trainer):
        out.setdefault(name, tensor)
    return out


def make_states(trainer: Trainer) -> None:
    """The optimizer's states exist from its first step on; before a load they are made by a step that changes nothing."""
    rates = [g["lr"] for g in trainer.optimizer.param_groups]
    parameters = [kept for _, kept, _ in weights(trainer)]
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    trainer.optimizer.step()
    for p in parameters:
        p.grad = None
    for group, rate in zip(trainer.optimizer.param_groups, rates):
        group["lr"] = rate


@torch.no_grad()
def spread(trainer: Trainer) -> None:
    """After a load: copies follow the tensor that was loaded, weights their masters."""
    first: dict[str, torch.Tensor] = {}
    for name, tensor in everything(trainer):
        if name in first:
            tensor.copy_(first[name])
        else:
            first[name] = tensor
    if trainer.masters:
        trainer.masters.give()
