"""Experts spread over ranks compute what they compute on one device, with tokens dropped or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from alike import Ranks, compare
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.simulate.expert import within_capacity
from trainwright.train.experts import places
from trainwright.train.modules import Balance, balance_loss

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp 2, ep 2": {"framework": "ddp", "dp": 2, "ep": 2},
    "ddp 4, ep 4": {"framework": "ddp", "dp": 4, "ep": 4},
    "ddp 4, ep 2": {"framework": "ddp", "dp": 4, "ep": 2},
    "replicate 2, ep 2": {"sharding": "none", "dp": 2, "ep": 2},
    "zero2 2, ep 2": {"sharding": "zero2", "dp": 2, "ep": 2},
    "zero3 2, ep 2": {"sharding": "zero3", "dp": 2, "ep": 2},
    "zero3 4, ep 2": {"sharding": "zero3", "dp": 4, "ep": 2},
    "zero3 4, ep 4": {"sharding": "zero3", "dp": 4, "ep": 4},
    "hsdp 2x2, ep 2": {"dp_replicate": 2, "dp_shard": 2, "dp": 4, "ep": 2},
    "tp 2, dp 2, ep 2": {"tp": 2, "dp": 2, "ep": 2},
    "sp 2, dp 2, ep 2": {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2},
    "cp 2, ep 2": {"cp": 2, "ep": 2},
    "cp 2, dp 2, ep 2": {"cp": 2, "dp": 2, "ep": 2},
    "cp 2, dp 2, ep 4": {"cp": 2, "dp": 2, "ep": 4},
    "pp 2, dp 2, ep 2": {"pp": 2, "dp": 2, "ep": 2, "micro_batch_size": 1},
    "recomputed": {"dp": 2, "ep": 2, "recompute": "full"},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n[:2] in ("tp", "sp", "cp", "pp") else ()) for n in LAYOUTS])
def test_no_token_is_dropped(ranks: Ranks, name: str) -> None:
    compare(ranks, "moe", {"micro_batch_size": 2, **LAYOUTS[name]})


@pytest.mark.parametrize("more", [{}, {"ep": 2}], ids=["one", "of a rank"])
def test_fewer_experts_than_shards_are_cut_within(ranks: Ranks, more: dict[str, Any]) -> None:
    compare(ranks, "few experts", {"micro_batch_size": 2, "dp": 4, "sharding": "zero3", **more}, one={"micro_batch_size": 2})


# Room is counted for one rank's tokens of one pass: layouts that cut a sequence drop others than one device does.
WHOLE = [name for name in LAYOUTS if not {"cp", "sequence_parallel"} & set(LAYOUTS[name])]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("name", ["one rank", *WHOLE])
def test_capacity(ranks: Ranks, name: str, factor: float) -> None:
    if name != "zero3 4, ep 2" and factor != 1.0 and name != "one rank":
        pytest.skip("one layout with every factor is enough")
    strategy = {"micro_batch_size": 2, **LAYOUTS.get(name, {})}
    one = {"micro_batch_size": strategy["micro_batch_size"]}
    found = compare(ranks, "moe", strategy, {"moe_capacity_factor": factor}, one)
    free = ranks(1)("deep:train", "moe", one)[0]
    dropped = found[0]["loss"][0] != pytest.approx(free["loss"][0], abs=1e-6)
    assert dropped == (factor < 8)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_places_are_the_simulators(tokens: int, count: int, data: st.DataObject) -> None:
    """First come, first served: the same choices are kept as in the exact simulation, and no two share a row."""
    top_k = data.draw(st.integers(1, count))
    factor = data.draw(st.sampled_from([0.25, 0.5, 1.0, 1.25, 4.0]))
    chosen = np.stack([np.random.default_rng(data.draw(st.integers(0, 999)) + i).permutation(count)[:top_k] for i in range(tokens)])
    keep, room = within_capacity(chosen, np.zeros(tokens, int), count, top_k, factor)
    found = places(torch.from_numpy(chosen), count, room).numpy()
    np.testing.assert_array_equal(found < count * room, keep.reshape(-1))
    rows = found[found < count * room]
    assert len(set(rows.tolist())) == len(rows)
    np.testing.assert_array_equal(rows // room, chosen.reshape(-1)[keep.reshape(-1)])


def test_balance_loss_is_one_where_experts_are_used_evenly() -> None:
    even = torch.arange(8).view(4, 2) % 4
    assert balance_loss(torch.full((4, 4), 0.25), even).item() == 1
    alone = torch.zeros(4, 4)
    alone[:, 2] = 1
    assert balance_loss(alone, torch.full((4, 1), 2)).item() == 4


def test_balance_loss_joins_what_is_differentiated() -> None:
    scores = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    probabilities = scores.softmax(-1)
    weights, experts = probabilities.topk(2)
    wanted = torch.autograd.grad(weights.square().sum() + 0.3 * balance_loss(probabilities, experts), scores, retain_graph=True)
    found = torch.autograd.grad(Balance.apply(weights, balance_loss(probabilities, experts), 0.3).square().sum(), scores)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in WHOLE if n != "recomputed"])
def test_balanced(ranks: Ranks, name: str) -> None:
    strategy = {"micro_batch_size": 2, **LAYOUTS[name]}
    one = {"micro_batch_size": strategy["micro_batch_size"]}
    found = compare(ranks, "moe", strategy, None, one, router_balance=0.5)
    free = ranks(1)("deep:train", "moe", one)[0]
    assert found[0]["norm"][0] != pytest.approx(free["norm"][0], rel=1e-3)
