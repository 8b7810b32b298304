"""Every target of the registry: what it must hold by being one."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from trainwright.emit import TARGETS, emit, read
from trainwright.emit.base import dig
from trainwright.emit.fields import ALL, FACTS, left, limits, says
from trainwright.errors import SpecError

from .cases import BY_HAND, flat, run_of, same

NAMES = sorted(TARGETS)


def test_the_targets_of_the_contract_are_there():
    assert set(NAMES) == {
        "torchtitan", "megatron", "deepspeed", "fsdp", "accelerate", "trainer", "torchrun", "slurm", "kubernetes", "skypilot"
    }  # fmt: skip
    assert set(BY_HAND) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_plan_is_said_or_limited_or_left(name):
    """Nothing of a plan is dropped in silence."""
    target, run = TARGETS[name], run_of(BY_HAND[name])
    known = {*says(target, run), *(limit.field for limit in limits(target, run)), *left(target, run), *FACTS}
    derived = {"strategy.dp", "strategy.dp_shard", "strategy.dp_replicate"}
    assert set(ALL) - known - derived == set()
    assert not set(says(target, run)) & set(left(target, run))
    assert all(f in ALL or f.startswith("cluster.") for f in says(target, run))


@pytest.mark.parametrize("name", NAMES)
def test_a_set_holds_a_readme_of_three_lines_and_then_reasons(name):
    run = run_of(BY_HAND[name])
    text = emit(run, name)["README.md"]
    first = text.splitlines()[:3]
    assert [line.split(":")[0] for line in first] == ["1. Install", "2. Run", "3. Expect"]
    assert "tokens/s per GPU" in first[2]
    assert "GiB" in first[2]
    assert "`NCCL_DEBUG=WARN`: a link or peer that fails is named in the log." in text


@pytest.mark.parametrize("name", NAMES)
def test_every_file_parses(name, tmp_path: Path):
    files = emit(run_of(BY_HAND[name]), name)
    assert len(files) >= 3 or name in ("kubernetes",)
    for file, text in files.items():
        assert text.endswith("\n")
        assert not {"\r", "\t"} & set(text)
        if file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".toml"):
            tomllib.loads(text)
        elif file.endswith((".yaml", ".yml")):
            pytest.importorskip("yaml").safe_load(text)
        elif file.endswith(".py"):
            compile(text, file, "exec")
        elif file.endswith((".sh", ".sbatch")):
            path = tmp_path / file
            path.write_text(text)
            subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
            if shutil.which("shellcheck"):
                subprocess.run(["shellcheck", "-S", "warning", str(path)], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_files_say_is_the_plan(name):
    if name in ("accelerate", "kubernetes", "skypilot"):
        pytest.importorskip("yaml")
    run = run_of(BY_HAND[name])
    files = emit(run, name)
    found = TARGETS[name].read(files)
    assert found is not None
    for field in says(TARGETS[name], run):
        assert same(field, dig(found, field), run), field
    for field, value in flat(found).items():
        assert same(field, value, run), field


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_knows_its_own_files_and_no_others(name):
    assert TARGETS[name].read({}) is None
    assert TARGETS[name].read({"notes.txt": "launch.sh", "launch.sh": "echo hello\n"}) is None


def test_reading_finds_the_target_by_content():
    found = read({k: v for k, v in emit(run_of(BY_HAND["deepspeed"]), "deepspeed").items() if k == "ds_config.json"})
    assert found is not None
    assert found[0].name == "deepspeed"
    assert found[1]["strategy"]["offload"] == "params-nvme"


def test_an_unknown_target_names_the_nearest():
    with pytest.raises(SpecError, match="nearest: torchtitan"):
        emit(run_of({}), "torchtitann")


@pytest.mark.parametrize(
    ("name", "strategy", "field", "near"),
    [
        ("fsdp", {"tp": 4}, "strategy.tp", "strategy.tp = 1"),
        ("torchtitan", {"pp": 2, "schedule": "zb-v", "sharding": "zero3"}, "strategy.sharding", "strategy.sharding = zero2"),
        ("fsdp", {"framework": "megatron"}, "strategy.framework", "strategy.framework = fsdp2"),
        ("trainer", {"framework": "fsdp2", "recompute": "selective"}, "training.gradient_dtype", "training.gradient_dtype = bf16"),
        (
            "deepspeed",
            {"framework": "deepspeed", "sharding": "zero2", "offload": "optimizer-nvme"},
            "strategy.offload",
            "strategy.sharding = zero3",
        ),
        ("torchtitan", {"offload": "activations-cpu"}, "strategy.offload", "strategy.offload = none"),
        ("megatron", {"framework": "megatron", "compile": True}, "strategy.compile", "strategy.compile = false"),
    ],
)
def test_what_a_target_cannot_express_names_the_field_and_the_nearest_plan(name, strategy, field, near):
    with pytest.raises(SpecError) as error:
        emit(run_of({"strategy": strategy}), name)
    assert error.value.where == field
    assert near in error.value.nearest
