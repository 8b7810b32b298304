"""What a rank holds between backward and the optimizer's step, in bytes: measured storages equal what the plan says, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
from layouts import run_of
from test_layouts import DATA, MODEL, merged, size_of
from workers import Workers

import trainwright as tw

KINDS = ("parameters", "master_weights", "gradients", "optimizer")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {name: (merged(make(2)), {}) for name, make in {**DATA, **MODEL}.items()}
CASES |= {f"zero3 x {m}": (merged(DATA["zero3"](2), MODEL[m](2)), {}) for m in MODEL}
CASES |= {
    "hsdp": (merged({"dp": 4, "dp_replicate": 2, "dp_shard": 2}), {}),
    "zero3, bf16": (merged(DATA["zero3"](2)), {"precision": "bf16"}),
    "zero3, fp16": (merged(DATA["zero3"](2)), {"precision": "fp16"}),
    "ddp, bf16 with masters": (merged(DATA["ddp"](2)), {"precision": "bf16", "master_weights": "fp32"}),
    "ddp, all in bf16": (merged(DATA["ddp"](2)), {"precision": "bf16", "master_weights": "none"}),
    "ddp, autocast": (merged(DATA["ddp"](2)), {"precision": "bf16", "autocast": True}),
}


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_resident_bytes_are_the_plans(ranks: Callable[[int], Workers], model: str, case: str) -> None:
    strategy, training = CASES[case]
    run = run_of(model, strategy, training)
    memory = tw.estimate(run.filled).to_dict()["memory"]
    memory["states"]["parameters"] -= run.model.buffer_bytes  # transformers keeps rotary frequencies, which are computed here
    answers = ranks(size_of(strategy))("layouts:train", model, strategy, training)
    held = [a["resident"] for a in answers if a["pp"] == memory["pipeline_rank"]]
    # The plan speaks of the fullest rank; ZeRO-1 hands out whole parameters, so that ranks differ.
    assert {kind: max(h[kind] for h in held) for kind in KINDS} == {kind: memory["states"][kind] for kind in KINDS}
