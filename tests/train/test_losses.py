"""Chunked and fused losses are the plain one, to a rounding error, in value and in every gradient; chunked ones keep no logits for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from alike import GRADIENT, LOSS, Ranks, size_of
from layouts import MODELS, batch, run_of

from trainwright.catalog.load import load_model
from trainwright.errors import SpecError
from trainwright.train import losses
from trainwright.train.decoder import Decoder, build, initialize

KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "chunked": lambda head, x, labels: losses.chunked(head, x, labels, 5),  # 32 tokens: four pieces of 7, one of 4
    "fused": losses.fused,
}


def made(model: str) -> Decoder:
    found = build(load_model(MODELS[model]))
    for name, p in found.named_parameters():
        initialize(name, p, 0)
    return found


def gradients(decoder: Decoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*decoder.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, weights)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["gpt", "llama", "tied"])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(model: str, kind: str) -> None:
    decoder, some = made(model), batch(0)
    plain = losses.loss_of(decoder(some.tokens), some.labels)
    wanted = gradients(decoder, plain / 100)
    decoder.loss = KINDS[kind]
    loss = decoder(some.tokens, labels=some.labels)
    assert abs(float((loss / plain).detach()) - 1) < 1e-6
    for name, gradient in gradients(decoder, loss / 100).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-6, msg=name)


def saved_bytes(decoder: Decoder, **labels: Any) -> int:
    """What forward keeps for backward: the largest tensor of it."""
    sizes = [0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
        out = decoder(batch(0).tokens, **labels)
        if not labels:
            losses.loss_of(out, batch(0).labels)
    return max(sizes)


def test_chunks_keep_no_logits() -> None:
    decoder = made("llama")
    logits = 8 * 32 * 256 * 4
    assert saved_bytes(decoder) == logits
    decoder.loss = KINDS["chunked"]
    assert saved_bytes(decoder, labels=batch(0).labels) <= logits / 2  # the widest activation of a layer


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"sharding": "zero3", "dp": 2, "micro_batch_size": 2},
    "ddp": {"framework": "ddp", "dp": 2, "micro_batch_size": 4},
    "tp": {"tp": 2, "micro_batch_size": 8},
    "sp": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8},
    "pp": {"pp": 2, "micro_batch_size": 2},
}
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS if not (kind == "fused" and "tp" in LAYOUTS[layout])]
SLOW = (("ddp", "chunked"), ("tp", "chunked"), ("zero3", "chunked"), ("pp", "fused"))


@pytest.mark.parametrize(("layout", "kind"), [pytest.param(*c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_layouts(ranks: Ranks, layout: str, kind: str) -> None:
    wanted = ranks(1)("layouts:train", "llama", {"micro_batch_size": 8})[0]
    strategy = LAYOUTS[layout]
    found = ranks(size_of(strategy))("layouts:train", "llama", strategy, {"loss": kind, "loss_chunks": 3})
    together: dict[str, np.ndarray] = {}
    for answer in found:
        together |= answer["gradients"]
    np.testing.assert_allclose(found[0]["loss"], wanted["loss"], rtol=0, atol=LOSS)
    for name, gradient in wanted["gradients"].items():
        np.testing.assert_allclose(together[name], gradient, rtol=0, atol=GRADIENT, err_msg=name)


def test_a_fused_loss_of_a_split_projection_is_refused() -> None:
    with pytest.raises(SpecError, match=r"training\.loss: the fused loss needs the whole output projection") as error:
        losses.check(run_of("llama", LAYOUTS["tp"], {"loss": "fused"}))
    assert "vocab-parallel" in str(error.value)
