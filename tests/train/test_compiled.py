"""Compiled blocks compute what blocks compute; what cannot be compiled is refused in a line. The gate traces (`aot_eager`), the slow tests make kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from alike import LOSS, Ranks, size_of
from layouts import CPU, run_of

from trainwright.errors import SpecError
from trainwright.train.compiled import backend_of, notes
from trainwright.train.device import Machine
from trainwright.train.settings import Settings

ZERO3 = {"sharding": "zero3", "dp": 2, "micro_batch_size": 2, "recompute": "full"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3, recompute": ZERO3,
    "ddp": {"framework": "ddp", "dp": 2, "micro_batch_size": 4},
    "pp": {"pp": 2, "micro_batch_size": 2},
}
CASES = [("zero3, recompute", "aot_eager"), *((layout, "inductor") for layout in LAYOUTS)]


@pytest.mark.parametrize(("layout", "backend"), [pytest.param(*c, marks=pytest.mark.slow if c[1] == "inductor" else ()) for c in CASES])
def test_layouts(ranks: Ranks, layout: str, backend: str) -> None:
    strategy = LAYOUTS[layout]
    wanted = ranks(1)("layouts:train", "llama", {"micro_batch_size": 8})[0]
    found = ranks(size_of(strategy))("layouts:compiled", "llama", strategy, backend, timeout_s=600)[0]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=LOSS)
    assert found["graphs"] == 1, "every layer was compiled anew, or none was"


def test_auto_compiles_where_the_plan_says_so_and_there_is_a_gpu() -> None:
    plan, gpu = run_of("llama", {"compile": True}), Machine("cuda", "nccl")
    assert backend_of(plan, Settings(), gpu) == "inductor"
    assert backend_of(plan, Settings(), CPU) is None
    assert backend_of(run_of("llama", {}), Settings(), gpu) is None
    assert backend_of(run_of("llama", {}), Settings(compile="inductor"), CPU) == "inductor"
    assert backend_of(plan, Settings(compile="off"), gpu) is None
    assert notes(plan, Settings(), None) == ["the plan's compile is left out on a CPU; --compile inductor asks for it"]
    assert (
        notes(plan, Settings(compile="off"), None)
        == notes(plan, Settings(), "inductor")
        == notes(run_of("llama", {}), Settings(), None)
        == []
    )


@pytest.mark.parametrize(
    ("strategy", "compiler", "said"),
    [
        ({}, "inductr", "compile: no compiler 'inductr' (nearest: inductor)"),
        ({"tp": 2}, "inductor", "strategy.tp: compiled blocks run here in data and pipeline parallelism (nearest: 1)"),
        (
            {"recompute": "selective"},
            "inductor",
            "strategy.recompute: selective recomputation looks at operations that a compiled block no longer has",
        ),
        ({"pp": 2, "schedule": "zb-h1"}, "inductor", "strategy.schedule: a schedule that makes weight gradients later"),
    ],
)
def test_refused(strategy: dict[str, Any], compiler: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        backend_of(run_of("llama", {"micro_batch_size": 1, **strategy}), Settings(compile=compiler), CPU)
    assert str(error.value).startswith(said)
