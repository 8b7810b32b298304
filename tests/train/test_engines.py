"""Which engine runs a plan, what it refuses in one line, and the file that DeepSpeed is given. Nothing here needs DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from layouts import run_of

from trainwright.cli import main
from trainwright.emit import Options, emit
from trainwright.errors import SpecError, TrainwrightError
from trainwright.train.engines import ENGINES, engine_of
from trainwright.train.engines import deepspeed as engine
from trainwright.train.extensions import alone
from trainwright.train.settings import Settings

DS = {"framework": "deepspeed", "dp": 2}


def run(strategy: dict[str, Any] | None = None, **training: Any) -> Any:
    return run_of("gpt", {**DS, **(strategy or {})}, training)


@pytest.mark.parametrize(
    ("framework", "named", "expected"),
    [
        ("fsdp2", "", "native"),
        ("ddp", "", "native"),
        ("deepspeed", "", "deepspeed"),
        ("deepspeed", "native", "native"),
        ("fsdp2", "deepspeed", "deepspeed"),
        ("fsdp2", "DS", "deepspeed"),
    ],
)
def test_the_plans_framework_names_the_engine_unless_somebody_does(framework: str, named: str, expected: str) -> None:
    sharding = "none" if framework == "ddp" else "zero3"
    assert engine_of(run({"framework": framework, "sharding": sharding}), Settings(engine=named)).name == expected


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"--engine: unknown engine 'deepspede' \(nearest: deepspeed\)"):
        engine_of(run(), Settings(engine="deepspede"))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another framework's plan": ({"framework": "fsdp2", "dp": 2}, {}, r"strategy.framework: fsdp2: .*strategy.framework = deepspeed"),
    "tensor parallelism": ({"tp": 2, "dp": 1}, {}, r"strategy.tp: 2: DeepSpeed runs here with data parallelism alone .*strategy.tp = 1"),
    "a pipeline": ({"pp": 2, "dp": 1, "sharding": "zero1"}, {}, r"strategy.pp: 2: .*strategy.pp = 1"),
    "Ulysses": ({"cp": 2, "dp": 1, "cp_kind": "ulysses"}, {}, r"strategy.cp: 2: .*strategy.cp = 1"),
    "fp16": ({}, {"precision": "fp16"}, r"training.precision: fp16: .*training.precision = bf16"),
    "another optimizer": (
        {},
        {"optimizer": "lion", "optimizer_kernel": "fused"},
        r"training.optimizer: lion: .*training.optimizer = adamw",
    ),
    "bf16 without shards": ({"sharding": "none"}, {"precision": "bf16"}, r"strategy.sharding: none: .*strategy.sharding = zero1"),
    "weights in the host's memory": ({"offload": "params-cpu"}, {}, r"strategy.offload: params-cpu: .*strategy.offload = none"),
    "adapters": ({}, {"method": "lora"}, r"training.method: lora: .*training.method = full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_run_is_one_line_with_the_nearest_plan(name: str) -> None:
    strategy, training, says = REFUSED[name]
    with pytest.raises(SpecError, match=says):
        engine.check(run(strategy, **training), Settings(), False)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.util, "find_spec", lambda name: None)
    with pytest.raises(TrainwrightError, match=r"DeepSpeed is not installed: pip install torch 'trainwright\[deepspeed\]'"):
        engine.check(run(), Settings(), False)


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp1", "megatron"])
def test_pytorchs_engine_does_not_run_unsharded_what_is_planned_sharded(framework: str) -> None:
    plan = run_of("gpt", {"framework": framework, "dp": 2, "sharding": "zero2" if framework == "megatron" else "zero3"})
    with pytest.raises(SpecError, match=r"strategy.framework: .*nearest: strategy.framework = fsdp2"):
        ENGINES["native"].check(plan, Settings(), False)


def test_fsdp1_without_shards_is_no_other_wrapper_without_a_word() -> None:
    with pytest.raises(SpecError, match=r"strategy.framework: fsdp1 .*nearest: strategy.framework = ddp"):
        ENGINES["native"].check(run_of("gpt", {"framework": "fsdp1", "dp": 2, "sharding": "none"}), Settings(), False)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"method": "lora", "lora_rank": 8}, "training.method: lora"),
        ({"dropout": 0.1}, "training.dropout"),
        ({"optimizer_in_backward": True, "global_batch_size": 2}, r"training.optimizer_in_backward: .*nearest: false"),
    ],
)
def test_pytorchs_engine_does_not_leave_out_without_a_word(training: dict[str, Any], said: str) -> None:
    """A plan with adapters would be trained whole, one with dropout without it."""
    with pytest.raises(SpecError, match=said):
        ENGINES["native"].check(run_of("gpt", {"framework": "ddp", "dp": 2}, training), Settings(), False)


@pytest.mark.parametrize(
    "strategy",
    [{"offload": "activations-cpu"}, {"framework": "ddp", "offload": "optimizer-cpu"}, {"async_tp": True}, {"cuda_graphs": True}],
)
def test_pytorchs_engine_does_not_run_without_a_part_of_the_layout(strategy: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="is only planned here"):
        ENGINES["native"].check(run_of("gpt", {"framework": "fsdp2", "dp": 2, **strategy}), Settings(), False)


def test_deepspeed_reads_what_emit_writes_with_the_runs_own_settings(tmp_path: Path) -> None:
    plan = run({"sharding": "zero2", "offload": "optimizer-cpu", "micro_batch_size": 2}, optimizer_kernel="foreach")
    settings = Settings(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, clip=0.5, weight_decay=0.2)
    (text,) = engine.files(plan, settings).values()
    (tmp_path / engine.CONFIG).write_text(text)
    found = engine.config_of(plan, settings, tmp_path)
    assert found == engine.config_of(plan, settings, None)
    assert found["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.2, "eps": 1e-6, "torch_adam": True, "foreach": True},
    }
    assert found["gradient_clipping"] == 0.5
    emitted = json.loads(emit(plan, "deepspeed", Options())[engine.CONFIG])
    same = found.keys() - {"optimizer", "gradient_clipping"}
    assert {k: found[k] for k in same} == {k: emitted[k] for k in same}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / engine.CONFIG).write_text("{")
    with pytest.raises(SpecError, match=r"ds_config.json: cannot be read"):
        engine.config_of(run(), Settings(), tmp_path)


@pytest.mark.parametrize(
    ("kernel", "offload", "compiled"),
    [
        ("foreach", "none", ()),
        ("for-loop", "optimizer-cpu", ()),
        ("fused", "none", ("FusedAdamBuilder",)),
        ("fused", "optimizer-cpu", ("CPUAdamBuilder",)),
    ],
)
def test_only_deepspeeds_own_adam_is_compiled(kernel: str, offload: str, compiled: tuple[str, ...]) -> None:
    plan = run({"offload": offload}, optimizer_kernel=kernel)
    assert engine.extensions(engine.config_of(plan, Settings(), None)) == compiled


# --- compiling, without a compiler


def test_a_lock_that_a_killed_process_of_ours_left_is_not_waited_for(tmp_path: Path) -> None:
    script = "import os, sys, pathlib; from trainwright.train.extensions import alone\nwith alone(pathlib.Path(sys.argv[1])) as _:\n"
    script += " (pathlib.Path(sys.argv[1]) / 'lock').touch(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60).returncode == 9
    assert (tmp_path / "lock").exists()
    with alone(tmp_path):
        assert not (tmp_path / "lock").exists()


def test_a_foreign_lock_is_waited_for_as_long_as_something_is_written(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    began = time.monotonic()
    with alone(tmp_path, stale_s=1.0, pause_s=0.05):
        assert not (tmp_path / "lock").exists()
    assert 0.5 < time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--engine", "deepspeed"),
            "strategy.framework: fsdp2: DeepSpeed configures DeepSpeed and nothing else (nearest: strategy.framework = deepspeed",
        ),
        (("--engine", "deepsped"), "--engine: unknown engine 'deepsped' (nearest: deepspeed)"),
        (
            ("--engine", "native", "--set", "strategy.framework=deepspeed"),
            "strategy.framework: deepspeed with zero3: PyTorch's own engine shards",
        ),
        (("--dry-run", "--set", "strategy.framework=deepspeed"), "strategy.framework: deepspeed with zero3: PyTorch's own engine shards"),
    ],
)
def test_the_command_refuses_before_anything_is_written(
    arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "-o", str(tmp_path / "run"), *arguments])
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
