"""Every strategy, and every pair of strategies, computes what one device computes: three steps of a tiny GPT, a tiny Llama and a tiny mixture of experts.

One device runs the same global batch (eight sequences with unevenly many target tokens) from the same weights. Losses after each step agree within 2e-6 in
fp32, all gradients of the first step within 1e-7, the clipped norm within 1e-6. In 16 bits one device runs in 16 bits as well: losses agree within 1e-3,
gradients within 1e-3 of the largest one (0.15) wherever they are summed in fp32. Where a layout itself sums in 16 bits, which one device does not do, they
agree within 1e-3 absolutely, about a unit in bf16's last place of the largest; sequence parallelism, which sums twice, within two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from workers import Workers

Strategy = dict[str, Any]
Ranks = Callable[[int], Workers]

# What one degree of parallelism does, for n ranks of it.
DATA: dict[str, Callable[[int], Strategy]] = {
    "ddp": lambda n: {"framework": "ddp", "dp": n},
    "zero1": lambda n: {"framework": "ddp", "sharding": "zero1", "dp": n},
    "replicate": lambda n: {"sharding": "none", "dp": n},
    "zero2": lambda n: {"sharding": "zero2", "dp": n},
    "zero3": lambda n: {"sharding": "zero3", "dp": n},
    "zero3, root kept": lambda n: {"sharding": "zero3", "dp": n, "reshard_root": False},
}
MODEL: dict[str, Callable[[int], Strategy]] = {
    "tp": lambda n: {"tp": n},
    "sp": lambda n: {"tp": n, "sequence_parallel": True},
    "pp": lambda n: {"pp": n, "micro_batch_size": 1},
}
# What is no degree: it goes along with every layout.
EXTRA: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "accumulation": ({"micro_batch_size": 1}, {}),
    "accumulation, reduced each time": ({"micro_batch_size": 1, "options": {"no_sync": False}}, {}),
    "recompute full": ({"recompute": "full"}, {}),
    "recompute every 2": ({"recompute": "full", "recompute_every": 2}, {}),
    "recompute selective": ({"recompute": "selective"}, {}),
    "recompute attention": ({"recompute": "selective", "recompute_modules": ["core_attn"]}, {}),
    "eager attention": ({"attention": "eager"}, {}),
    "SGD": ({}, {"optimizer": "sgd_momentum"}),
    "Muon": ({}, {"optimizer": "muon"}),
}


def merged(*parts: Strategy) -> Strategy:
    found: Strategy = {"micro_batch_size": 2}
    for part in parts:
        found |= part
    return found


SINGLE = {f"{name} {n}": (merged(make(n)), {}) for name, make in {**DATA, **MODEL}.items() for n in (2, 4)}
SINGLE |= {"hsdp 2x2": (merged({"dp_replicate": 2, "dp_shard": 2, "dp": 4}), {})}
SINGLE |= {"hsdp zero2 2x2": (merged({"dp_replicate": 2, "dp_shard": 2, "dp": 4, "sharding": "zero2"}), {})}
for _n in (2, 4):
    SINGLE[f"tp {_n}, loss parallel"] = (merged({"tp": _n}), {"loss": "vocab-parallel"})
    SINGLE[f"sp {_n}, loss parallel"] = (merged({"tp": _n, "sequence_parallel": True}), {"loss": "vocab-parallel"})
PAIRS = {f"{d} x {m}": (merged(make(2), split(2)), {}) for d, make in DATA.items() for m, split in MODEL.items()}
PAIRS |= {f"{m} x pp": (merged(MODEL[m](2), MODEL["pp"](2)), {}) for m in ("tp", "sp")}
PAIRS |= {"zero3 x sp, loss parallel": (merged(DATA["zero3"](2), MODEL["sp"](2)), {"loss": "vocab-parallel"})}
WITH = {
    f"{layout}, {extra}": (merged(strategy, more), training)
    for layout, strategy in {
        "ddp": DATA["ddp"](2),
        "zero1": DATA["zero1"](2),
        "replicate": DATA["replicate"](2),
        "zero2": DATA["zero2"](2),
        "zero3": DATA["zero3"](2),
        "sp": MODEL["sp"](2),
        "pp": MODEL["pp"](2),
    }.items()
    for extra, (more, training) in EXTRA.items()
    if not (layout == "zero1" and "optimizer" in training)
}
OFFLOAD = {f"zero3 {n}, offload": (merged(DATA["zero3"](n), {"offload": "params-cpu"}), {}) for n in (2, 4)}
CASES = SINGLE | PAIRS | WITH | OFFLOAD
# Two key-value heads do not divide over four ranks; what goes along with a layout does so whatever the model, so that one layout shows it.
LLAMA_CASES = {k: v for k, v in (SINGLE | PAIRS).items() if v[0].get("tp") != 4} | {k: v for k, v in WITH.items() if k.startswith("zero3,")}
MOE_CASES = {k: v for k, v in (SINGLE | PAIRS).items() if v[0].get("tp") != 4}
PRECISIONS: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "zero3, bf16": (DATA["zero3"](2), {"precision": "bf16"}),
    "zero2, bf16, gradients summed in bf16": (DATA["zero2"](2), {"precision": "bf16", "gradient_dtype": "bf16"}),
    "replicate, bf16": (DATA["replicate"](2), {"precision": "bf16"}),
    "zero3 x sp, bf16": (DATA["zero3"](2) | MODEL["sp"](2), {"precision": "bf16"}),
    "pp, bf16": (MODEL["pp"](2), {"precision": "bf16"}),
    "ddp, bf16 with masters": (DATA["ddp"](2), {"precision": "bf16", "master_weights": "fp32"}),
    "zero1, bf16 with masters": (DATA["zero1"](2), {"precision": "bf16", "master_weights": "fp32"}),
    "ddp, autocast": (DATA["ddp"](2), {"precision": "bf16", "autocast": True}),
    "zero3, fp16": (DATA["zero3"](2), {"precision": "fp16"}),
    "ddp, fp16 with masters": (DATA["ddp"](2), {"precision": "fp16", "master_weights": "fp32"}),
}
# Data-parallel sums of 16-bit gradients, and tensor parallelism's sums of 16-bit activations.
SUMMED_IN_16_BITS = {
    "zero2, bf16, gradients summed in bf16",
    "zero3 x sp, bf16",
    "ddp, bf16 with masters",
    "zero1, bf16 with masters",
    "ddp, fp16 with masters",
}
BF16_BITS, FP16_BITS = 8, 11  # of a significand, the one before the point included


def size_of(strategy: Strategy) -> int:
    return int(np.prod([strategy.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")]))


@lru_cache
def reference(one: Workers, model: str, optimizer: str, precision: str = "fp32") -> dict[str, Any]:
    return one("layouts:train", model, {"micro_batch_size": 8}, {"optimizer": optimizer, "precision": precision})[0]


def compare(ranks: Ranks, model: str, strategy: Strategy, training: dict[str, Any]) -> None:
    wanted = reference(ranks(1), model, training.get("optimizer", "adamw"))
    found = ranks(size_of(strategy))("layouts:train", model, strategy, training)
    gradients: dict[str, np.ndarray] = {}
    for answer in found:
        assert answer["loss"] == found[0]["loss"], "ranks report different losses"
        gradients |= answer["gradients"]
    np.testing.assert_allclose(found[0]["loss"], wanted["loss"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[0]["norm"][0], wanted["norm"][0], rtol=1e-6)
    assert set(wanted["gradients"]) <= set(gradients)
    for name, gradient in wanted["gradients"].items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-7, err_msg=name)


# One of each in the gate, the rest of the matrix with `-m slow`.
GATE = {k for k in SINGLE if k.endswith(" 2")} | {k for k in WITH if k.startswith("zero3,")} | {"hsdp 2x2", "zero3 2, offload"}
GATE |= {"zero3 x tp", "zero3 x sp", "zero3 x pp", "ddp x sp", "sp x pp"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in GATE else pytest.mark.slow) for c in CASES])
def test_gpt(ranks: Ranks, case: str) -> None:
    compare(ranks, "gpt", *CASES[case])


def test_what_is_chosen_otherwise_is_said(ranks: Ranks) -> None:
    said = ranks(2)("layouts:notes", "gpt", {"dp": 2}, {"optimizer": "sgd_momentum", "optimizer_kernel": "fused"})
    assert said == [["PyTorch's fused SGD takes no sharded weights: foreach runs instead"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", LLAMA_CASES)
def test_llama(ranks: Ranks, case: str) -> None:
    compare(ranks, "llama", *LLAMA_CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MOE_CASES)
def test_mixture_of_experts(ranks: Ranks, case: str) -> None:
    compare(ranks, "moe", *MOE_CASES[case])


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", PRECISIONS)
def test_16_bits(ranks: Ranks, model: str, case: str) -> None:
    """Against one device in the same format, with as many sequences at once. The loss scale of fp16 is gone from gradients and norms."""
    strategy, training = PRECISIONS[case]
    strategy = merged(strategy)
    framework = strategy.get("framework", "fsdp2")
    alone = {
        "micro_batch_size": strategy["micro_batch_size"],
        "framework": framework,
        "sharding": "none" if framework == "ddp" else "zero3",
    }
    wanted = ranks(1)("layouts:train", model, alone, {k: v for k, v in training.items() if k != "gradient_dtype"})[0]
    found = ranks(size_of(strategy))("layouts:train", model, strategy, training)
    gradients: dict[str, np.ndarray] = {}
    for answer in found:
        gradients |= answer["gradients"]
    bits = BF16_BITS if training["precision"] == "bf16" else FP16_BITS
    near = 3.0 * 2.0**-bits if case in SUMMED_IN_16_BITS else 1e-3  # six roundings of half a unit: partial sums of ranks, and their sums
    scale = max(float(np.abs(g).max()) for g in wanted["gradients"].values())
    np.testing.assert_allclose(found[0]["loss"], wanted["loss"], rtol=0, atol=1e-3)
    assert found[0]["loss"] != reference(ranks(1), model, "adamw")["loss"], "nothing was computed in 16 bits"
    np.testing.assert_allclose(found[0]["norm"][0], wanted["norm"][0], rtol=near)
    within = 2e-3 if "x sp" in case else 1e-3 if case in SUMMED_IN_16_BITS else 1e-3 * scale
    for name, gradient in wanted["gradients"].items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=within, err_msg=name)


def test_an_overflow_in_fp16_changes_nothing_and_halves_the_scale(ranks: Ranks) -> None:
    answers = ranks(2)("layouts:overflow", {"dp": 2}, {"precision": "fp16"})
    assert answers[0] == answers[1]
    assert answers[0] == {"skipped": [True, False], "same": True, "scale": 2.0**39}


@pytest.mark.parametrize("case", ["zero3 2", "ddp 2", "sp 2", "pp 2", "hsdp 2x2"])
def test_the_whole_gradient_is_clipped_whatever_splits_it(ranks: Ranks, case: str) -> None:
    """With a small limit every step is clipped; losses stay those of one device, which they would not if a part were clipped by its own norm."""
    strategy, training = SINGLE[case]
    clip = {"clip": 0.05, "learning_rate": 0.5}
    wanted = ranks(1)("layouts:train", "gpt", {"micro_batch_size": 8}, {"optimizer": "sgd"}, **clip)[0]
    found = ranks(size_of(strategy))("layouts:train", "gpt", strategy, {**training, "optimizer": "sgd"}, **clip)[0]
    unclipped = ranks(1)("layouts:train", "gpt", {"micro_batch_size": 8}, {"optimizer": "sgd"}, **{**clip, "clip": 0.0})[0]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=2e-6)
    assert abs(unclipped["loss"][1] - wanted["loss"][1]) > 1e-3
