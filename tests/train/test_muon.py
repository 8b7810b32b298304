"""Muon of a mixture of experts: a layer's experts are a stack of matrices, each stepped on as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from alike import Ranks, compare
from torch import nn

from trainwright.train.optimizer import Muon
from trainwright.train.settings import Settings


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_every_expert_of_a_stack_steps_as_a_matrix_alone(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, *shape))
    alone = [nn.Parameter(w.clone()) for w in stack.detach()]
    gradients = [torch.randn(3, *shape) for _ in range(2)]
    together = Muon([("m.layers.0.experts.up_proj.weight", stack), ("head.weight", nn.Parameter(torch.zeros(2, 2)))], Settings(), {})
    apart = Muon([*((f"m.layers.0.{i}.weight", p) for i, p in enumerate(alone)), ("b", nn.Parameter(torch.zeros(2)))], Settings(), {})
    for g in gradients:
        stack.grad = g
        for p, mine in zip(alone, g):
            p.grad = mine
        together.step()
        apart.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]), rtol=0, atol=1e-6)
    assert list(together.state[stack]) == ["momentum_buffer"]


@pytest.mark.parametrize("more", [{}, {"ep": 2}], ids=["cut between experts", "experts over ranks"])
def test_a_mixture_on_two_ranks_is_that_of_one_device(ranks: Ranks, more: dict[str, Any]) -> None:
    compare(ranks, "moe", {"dp": 2, "sharding": "zero3", "micro_batch_size": 2, **more}, {"optimizer": "muon"}, {"micro_batch_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"ep": 2}], ids=["cut within experts", "and over ranks"])
def test_fewer_experts_than_shards_are_joined_for_the_iteration(ranks: Ranks, more: dict[str, Any]) -> None:
    """Gradients as exact as elsewhere; the iteration makes rounding in directions that have no gradient as long as any other."""
    strategy = {"dp": 4, "sharding": "zero3", "micro_batch_size": 2, **more}
    compare(ranks, "few experts", strategy, {"optimizer": "muon"}, {"micro_batch_size": 2}, loss=1e-3)
