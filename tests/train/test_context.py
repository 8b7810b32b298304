"""Context parallelism: parts of a sequence attend to each other as the whole sequence does on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from alike import Ranks, compare

KINDS = ("ring", "allgather", "ulysses")


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_alone(ranks: Ranks, kind: str, size: int, documents: bool) -> None:
    """Results and gradients of queries, keys, values, with and without a window, fused and plain; grouped heads; within 1e-5 of float64."""
    for answer in ranks(size)("attention_ranks:differences", kind, documents):
        for case, difference in answer.items():
            assert difference < 1e-5, case


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.slow), "llama", pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(ranks: Ranks, kind: str, model: str, documents: bool) -> None:
    compare(ranks, model, {"cp": 2, "cp_kind": kind, "micro_batch_size": 2}, documents=documents)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks(ranks: Ranks, kind: str, model: str) -> None:
    if kind == "ulysses" and model != "gpt":
        pytest.skip("two key-value heads do not divide over four ranks")
    compare(ranks, model, {"cp": 4, "cp_kind": kind, "micro_batch_size": 4}, documents=True)


BESIDE: dict[str, dict[str, Any]] = {
    "ddp": {"framework": "ddp", "dp": 2},
    "zero1": {"framework": "ddp", "sharding": "zero1", "dp": 2},
    "replicate": {"sharding": "none", "dp": 2},
    "zero2": {"sharding": "zero2", "dp": 2},
    "zero3": {"sharding": "zero3", "dp": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "loss parallel": {"tp": 2, "sequence_parallel": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_pairs(ranks: Ranks, kind: str, beside: str) -> None:
    """Packed documents, in every pair of strategies. GPT's four heads over two and two; the ring with grouped heads."""
    training = {"loss": "vocab-parallel"} if beside == "loss parallel" else {}
    strategy = {"cp": 2, "cp_kind": kind, "micro_batch_size": 2, **BESIDE[beside]}
    compare(ranks, "gpt" if kind == "ulysses" else "llama", strategy, training, {"micro_batch_size": 8}, documents=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "recompute", [{"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["core_attn"]}], ids=["full", "core"]
)
def test_recomputed(ranks: Ranks, kind: str, recompute: dict[str, Any]) -> None:
    compare(ranks, "llama", {"cp": 2, "cp_kind": kind, "micro_batch_size": 2, **recompute}, documents=True)


def test_bf16(ranks: Ranks) -> None:
    compare(ranks, "llama", {"cp": 4, "cp_kind": "ring", "micro_batch_size": 8}, {"precision": "bf16"}, loss=1e-3, gradient=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_work_is_even(size: int) -> None:
    """Every rank computes the same number of query-key products: n - 1 half squares and its own triangle."""
    from trainwright.train.context import block_of

    tokens = 8
    for here in range(size):
        blocks = [block_of(here, source, tokens) for source in range(size)]
        areas = [np.prod([len(range(*part.indices(tokens))) for part in (b.rows, b.keys)]) for b in blocks if not b.causal]
        assert areas == [tokens * tokens // 2] * (size - 1)
        assert [b.causal for b in blocks] == [source == here for source in range(size)]
