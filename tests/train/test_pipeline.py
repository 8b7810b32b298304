"""Every registered schedule runs on real ranks, from the very list that the planner replays, and computes what one device computes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from alike import Ranks, compare

from trainwright.schedules import SCHEDULES

NAMES = sorted(SCHEDULES)


def layout(name: str, ranks: int, **more: Any) -> dict[str, Any]:
    return {"pp": ranks, "micro_batch_size": 1, "schedule": name, "virtual_stages": SCHEDULES[name].default_chunks, **more}


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_on_two_ranks(ranks: Ranks, name: str) -> None:
    """A GPT, whose table and head are one weight on two ranks, in uneven stages."""
    compare(ranks, "gpt-7", layout(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_on_four_ranks(ranks: Ranks, name: str) -> None:
    """A Llama with grouped heads; its table and head are one weight where the backward is split or goes two ways."""
    compare(ranks, "tied-7" if SCHEDULES[name].splits_backward else "llama-7", layout(name, 4))


# One of each kind: plain, looped, split backward, V-shaped, two ways.
KINDS = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")
BESIDE: dict[str, dict[str, Any]] = {
    "ddp": {"framework": "ddp", "dp": 2},
    "zero2": {"dp": 2, "sharding": "zero2"},
    "zero3": {"dp": 2, "sharding": "zero3"},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "recompute": {"recompute": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", KINDS)
def test_pairs(ranks: Ranks, name: str, beside: str) -> None:
    compare(ranks, "tied-7", layout(name, 2, **BESIDE[beside]))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", pytest.param("fsdp2, recomputed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_autocast(ranks: Ranks, name: str, wrapper: str, precision: str) -> None:
    """Against one device under autocast that runs one sequence at a time as well: the products are the same, so are their roundings.

    Under FSDP2 a weight's 16-bit copy must not outlive the micro-batch it was made for, or gradients are reduced before the last of them is there.
    """
    training = {"precision": precision, "autocast": True}
    framework, *more = wrapper.split(", ")
    strategy = layout(name, 2, framework=framework, **({"recompute": "full"} if more else {}))
    compare(ranks, "gpt-7", strategy, training, one={"framework": "ddp", "micro_batch_size": 1}, loss=1e-4, gradient=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_experts(ranks: Ranks, name: str) -> None:
    compare(ranks, "moe-7", layout(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_experts_over_data_ranks(ranks: Ranks, name: str) -> None:
    compare(ranks, "moe-7", layout(name, 2, dp=2, ep=2, sharding="zero3"))


def test_given_stages(ranks: Ranks) -> None:
    compare(ranks, "llama-7", layout("1f1b", 4, layers_per_stage=[1, 3, 2, 1]))
