"""DeepSpeed computes what one device computes: losses, whole gradients, norms and weights of three steps; what it saves, either engine goes on with.

Needs the extra ``deepspeed``. Nothing is compiled but in the last test, which runs where DeepSpeed's own Adam is compiled already: PyTorch's AdamW
(``training.optimizer_kernel = "foreach"``) steps. All cases of a number of ranks run in one world, because DeepSpeed keeps its groups as long as the
process lives.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: pip install -c constraints.txt '.[deepspeed]'", allow_module_level=True)
from layouts import run_of
from test_run import PLAN, ended, losses, rank_of, soak_kills, train
from torch.utils.cpp_extension import get_default_build_root
from workers import Workers

from trainwright.train.engines import deepspeed as engine
from trainwright.train.settings import Settings

pytestmark = pytest.mark.deepspeed
Ranks = Callable[[int], Workers]
Layout = dict[str, Any]
TORCH = {"optimizer_kernel": "foreach"}
LIMIT_S = 400.0


def zero(stage: str, ranks: int = 2, **more: Any) -> Layout:
    return {"sharding": stage, "dp": ranks, "micro_batch_size": 2, **more}


OFFLOAD = {"offload": "optimizer-cpu"}
TWO: dict[str, tuple[str, Layout, dict[str, Any], dict[str, Any]]] = {
    **{f"{stage}, gpt": ("gpt", zero(stage), TORCH, {}) for stage in ("none", "zero1", "zero2", "zero3")},
    **{f"{stage} offloaded, gpt": ("gpt", zero(stage, **OFFLOAD), TORCH, {}) for stage in ("zero1", "zero2", "zero3")},
    "zero2, llama": ("llama", zero("zero2"), TORCH, {}),
    "zero3, tied llama": ("tied", zero("zero3"), TORCH, {}),
    "zero1, experts": ("moe", zero("zero1"), TORCH, {}),
    "zero3, experts": ("moe", zero("zero3"), TORCH, {}),
    "zero2, four micro-batches": ("gpt", zero("zero2", micro_batch_size=1), TORCH, {}),
    "zero3, one by one": ("gpt", zero("zero3"), {"optimizer_kernel": "for-loop"}, {}),
    "zero1, recomputed": ("llama", zero("zero1", recompute="full"), TORCH, {}),
    "zero3, clipped": ("gpt", zero("zero3"), TORCH, {"clip": 0.05}),
    "none, clipped": ("gpt", zero("none"), TORCH, {"clip": 0.05}),
    "zero2, warm-up": ("gpt", zero("zero2"), TORCH, {"warmup_steps": 2}),
}
FOUR = {f"{stage} on four ranks": ("gpt", zero(stage, 4), TORCH, {}) for stage in ("zero2", "zero3")}
LOW = {
    "zero1, bf16, summed in fp32": ("llama", zero("zero1"), {**TORCH, "precision": "bf16", "gradient_dtype": "fp32"}, {}),
    "zero2, bf16": ("llama", zero("zero2"), {**TORCH, "precision": "bf16"}, {}),
    "zero3, bf16": ("llama", zero("zero3"), {**TORCH, "precision": "bf16"}, {}),
}
COMPILED = {
    "fused_adam": ("zero3, DeepSpeed's Adam", ("gpt", zero("zero3"), {}, {})),
    "cpu_adam": ("zero2 offloaded, DeepSpeed's Adam", ("gpt", zero("zero2", **OFFLOAD), {}, {})),
}
FSDP = {"framework": "fsdp2", "sharding": "zero3", "dp": 2, "micro_batch_size": 2}
DDP = {"framework": "ddp", "sharding": "none", "dp": 2, "micro_batch_size": 2}
MOVES: dict[str, tuple[str, Layout, Layout]] = {
    "DeepSpeed's ZeRO-3 to itself": ("llama", zero("zero3"), zero("zero3")),
    "DeepSpeed's ZeRO-3 to DDP": ("llama", zero("zero3"), DDP),
    "DDP to DeepSpeed's ZeRO-3": ("llama", DDP, zero("zero3")),
    "DeepSpeed's ZeRO-2 to FSDP2": ("tied", zero("zero2"), FSDP),
    "FSDP2 to DeepSpeed's ZeRO-1": ("tied", FSDP, zero("zero1")),
    "DeepSpeed's ZeRO-1 to ZeRO-0": ("gpt", zero("zero1"), zero("none")),
    "DeepSpeed's ZeRO-0 to ZeRO-2 offloaded": ("gpt", zero("none"), zero("zero2", **OFFLOAD)),
    "DeepSpeed's ZeRO-3 offloaded to ZeRO-3": ("gpt", zero("zero3", **OFFLOAD), zero("zero3")),
}


def is_compiled(name: str) -> bool:
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return any(root.glob(f"**/{name}/{name}.so"))


@pytest.fixture(scope="module")
def two(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    there = dict(case for name, case in COMPILED.items() if is_compiled(name))
    environment = {engine.OPS: ""}
    for model, layout, training, _ in there.values():
        run = run_of(model, {"framework": "deepspeed", **layout}, training)
        environment[engine.OPS] += ";" + engine.prepare(run, Settings(device="cpu"), lambda line: None)[engine.OPS]
    folder = str(tmp_path_factory.mktemp("moves"))
    return ranks(2)("deepspeed_ranks:everything", folder, {**TWO, **LOW, **there}, MOVES, environment, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def four(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks(4)("deepspeed_ranks:cases", FOUR, timeout_s=LIMIT_S)


def one_device(ranks: Ranks, model: str, **settings: Any) -> dict[str, Any]:
    return ranks(1)("deepspeed_ranks:one_device", model, **settings)[0]


def compare(ranks: Ranks, found: list[dict[str, Any]], model: str, settings: dict[str, Any]) -> None:
    wanted = one_device(ranks, model, **settings)
    state: dict[str, np.ndarray] = {}
    for answer in found:
        assert answer["loss"] == found[0]["loss"], "ranks report different losses"
        assert not state.keys() & answer["state"].keys(), "a tensor is kept by two ranks"
        state |= answer["state"]
    np.testing.assert_allclose(found[0]["loss"], wanted["loss"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[0]["norm"], wanted["norm"], rtol=1e-6)
    assert found[0]["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        np.testing.assert_allclose(found[0]["gradients"][name], gradient, rtol=0, atol=1e-7, err_msg=name)
    assert state.keys() == wanted["state"].keys()
    for name, tensor in wanted["state"].items():
        np.testing.assert_allclose(state[name], tensor, rtol=0, atol=2e-6 if name.startswith("model.") else 1e-6, err_msg=name)


@pytest.mark.parametrize("case", TWO)
def test_losses_gradients_and_weights_are_those_of_one_device(ranks: Ranks, two: list[dict[str, Any]], case: str) -> None:
    model, _, _, settings = TWO[case]
    compare(ranks, [answer[case] for answer in two], model, settings)


@pytest.mark.parametrize("name", COMPILED)
def test_deepspeeds_own_adam_does_too(ranks: Ranks, two: list[dict[str, Any]], name: str) -> None:
    if not is_compiled(name):
        pytest.skip(f"{name} is not compiled here (minutes; trainwright train does it)")
    case, (model, _, _, settings) = COMPILED[name]
    compare(ranks, [answer[case] for answer in two], model, settings)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_as_well(ranks: Ranks, four: list[dict[str, Any]], case: str) -> None:
    compare(ranks, [answer[case] for answer in four], "gpt", {})


def test_the_clipped_run_is_another_one(two: list[dict[str, Any]]) -> None:
    assert abs(two[0]["zero3, clipped"]["loss"][2] - two[0]["zero3, gpt"]["loss"][2]) > 1e-5


@pytest.mark.parametrize("case", LOW)
def test_16_bits_stay_near(ranks: Ranks, two: list[dict[str, Any]], case: str) -> None:
    wanted, found = one_device(ranks, "llama"), two[0][case]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=1e-3)
    assert found["loss"] != wanted["loss"], "nothing was computed in 16 bits"
    np.testing.assert_allclose(found["norm"], wanted["norm"], rtol=2e-2)


@pytest.mark.parametrize("case", MOVES)
def test_what_one_engine_saves_the_other_goes_on_with(two: list[dict[str, Any]], case: str) -> None:
    """Every weight and every state to the bit; the losses of the next two steps, the second after an update, are those of the first layout."""
    for answer in two:
        assert answer[case]["same"] == []
        assert answer[case]["compared"] > 0
        assert answer[case]["steps"] == 2
    first, second = two[0][case]["loss"]
    np.testing.assert_allclose(first, second, rtol=0, atol=2e-6)
    if case == "DeepSpeed's ZeRO-3 to itself":
        assert first == second


def test_shards_take_their_share_of_memory(two: list[dict[str, Any]]) -> None:
    whole, halves, optimizer = (two[0][f"{stage}, gpt"]["memory"] for stage in ("none", "zero3", "zero1"))
    assert whole["optimizer"] == pytest.approx(2 * whole["parameters"], rel=0.01)
    assert halves["parameters"] == pytest.approx(whole["parameters"] / 2, rel=0.05)
    for shares in (halves, optimizer):  # a flat copy of its share beside the two states, in fp32 as well
        assert shares["optimizer"] == pytest.approx(3 * whole["parameters"] / 2, rel=0.05)


DEEPSPEED = PLAN.replace("fsdp2", "deepspeed").replace('precision = "fp32"', 'precision = "fp32"\noptimizer_kernel = "foreach"')


def test_a_killed_run_goes_on_by_itself_and_a_finished_one_by_the_other_engine_and_back(tmp_path: Path) -> None:
    """Every loss that is written twice is the same to the bit; PyTorch's FSDP2 takes four steps from DeepSpeed's checkpoint, DeepSpeed four from that."""
    (tmp_path / "plan.toml").write_text(DEEPSPEED)
    run = tmp_path / "run"
    process = train(tmp_path, "plan.toml", "-o", str(run), "--steps", "60")
    assert soak_kills.until(lambda: max(losses(run), default=0) >= 6 or process.poll() is not None, 300)
    victims = [pid for pid, what in soak_kills.processes(run).items() if what == "rank" and rank_of(pid) == 1]
    os.kill(victims[0], signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 0, err
    assert "started again" in err
    assert soak_kills.processes(run) == {}
    seen: dict[int, set[float]] = {}
    for event in soak_kills.events(run):
        if event["event"] == "step":
            seen.setdefault(event["step"], set()).add(event["loss"])
    assert sorted(seen) == list(range(1, 61))
    assert all(len(found) == 1 for found in seen.values()), seen
    for steps, *more in (("64", "--engine", "native", "--set", "strategy.framework=fsdp2"), ("68",)):
        spec = () if more else ("plan.toml",)
        status, _, err = ended(train(tmp_path, *spec, "--resume", str(run), "--steps", steps, *(more or ("--engine", "deepspeed"))))
        assert status == 0, err
    found = losses(run)
    assert sorted(found) == list(range(1, 69))
    assert all(found[s] < found[1] for s in range(61, 69))
