"""A module that somebody else wrote, trained in our layouts: a transformers Llama in five lines computes in each what it computes on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from alike import GRADIENT, LOSS, Ranks, size_of
from layouts import run_of

from trainwright.errors import SpecError
from trainwright.train import adopt

ONE = {"framework": "ddp", "micro_batch_size": 8}
SLOW = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"framework": "ddp", "dp": 2, "micro_batch_size": 2},
    "zero3, recompute": {"sharding": "zero3", "dp": 2, "micro_batch_size": 4, "recompute": "full"},
    "tp": {"sharding": "none", "tp": 2, "micro_batch_size": 8},
    "zero1": {"framework": "ddp", "sharding": "zero1", "dp": 2, "micro_batch_size": 4},
    "zero2": {"sharding": "zero2", "dp": 2, "micro_batch_size": 2},
    "replicate": {"sharding": "none", "dp": 2, "micro_batch_size": 4},
    "hsdp": {"sharding": "zero3", "dp": 4, "dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1},
    "zero3 x tp": {"sharding": "zero3", "dp": 2, "tp": 2, "micro_batch_size": 4},
}
GATE = ("ddp", "zero3, recompute", "tp")


@pytest.fixture(scope="module")
def one(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = ranks(1)("own:train", "Llama", ONE)[0]
    assert abs(found["loss"][0] - ranks(1)("own:their_loss")[0]) < LOSS
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in GATE else SLOW) for n in LAYOUTS])
def test_every_layout_computes_what_one_device_computes(ranks: Ranks, one: dict[str, Any], name: str) -> None:
    strategy = LAYOUTS[name]
    model = "Split" if "tp" in strategy else "Llama"  # which also writes its loss another way
    found = ranks(size_of(strategy))("own:train", model, strategy)[0]
    np.testing.assert_allclose(found["loss"], one["loss"], rtol=0, atol=LOSS)
    assert set(found["gradients"]) == set(one["gradients"])
    for key, gradient in one["gradients"].items():
        np.testing.assert_allclose(found["gradients"][key], gradient, rtol=0, atol=10 * GRADIENT, err_msg=key)


def test_a_checkpoint_goes_on_in_its_layout_to_the_bit_and_in_another(ranks: Ranks, tmp_path: Path) -> None:
    zero3, ddp = LAYOUTS["zero3, recompute"], LAYOUTS["ddp"]
    whole, again = ranks(2)("own:resumed", str(tmp_path / "same"), zero3, zero3)[0]
    assert again == whole
    whole, other = ranks(2)("own:resumed", str(tmp_path / "other"), zero3, ddp)[0]
    np.testing.assert_allclose(other, whole, rtol=0, atol=LOSS)


@pytest.mark.parametrize(
    ("strategy", "training", "said"),
    [
        ({"pp": 2}, {}, "strategy.pp: a module of your own does not say the pieces of a pipeline"),
        ({"cp": 2}, {}, "strategy.cp: a module of your own does not say attention over parts of a sequence"),
        ({}, {"loss": "chunked"}, "training.loss: a module of your own gives logits"),
        ({}, {"packing": True}, "training.packing: a module of your own sees no document boundaries"),
        ({"recompute": "full", "recompute_every": 2}, {}, "strategy.recompute_every: blocks of your own are recomputed whole"),
    ],
)
def test_what_the_protocol_does_not_say_is_refused(strategy: dict[str, Any], training: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        adopt.check(run_of("llama", {"micro_batch_size": 1, **strategy}, training))
    assert str(error.value).startswith(said)


def test_tensor_parallelism_needs_a_plan_and_forward_must_give_logits(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"strategy\.tp: the module has no tensor_parallel plan"):
        ranks(2)("own:train", "Llama", LAYOUTS["tp"])
    with pytest.raises(AssertionError, match=r"forward gave \(8, 32, 16\), not logits \(8, 32, 256\)"):
        ranks(1)("own:train", "Wrong", ONE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own", "model_from: 'own' is not package.module:function (nearest: mypackage.models:make)"),
        ("nowhere.at_all:make", "model_from: nowhere.at_all cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("json:make", "model_from: json has no function make"),
    ],
)
def test_a_name_that_is_none(name: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        adopt.maker_of(name)
    assert str(error.value) == said
