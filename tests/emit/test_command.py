"""``trainwright emit``: all of the files or none, nothing replaced unasked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainwright.cli import main
from trainwright.cli.emit import write_all
from trainwright.emit import TARGETS
from trainwright.errors import SpecError

LINE = ["emit", "llama-3.1-8b", "--on", "16xH100", "--recompute", "full"]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*LINE, *words])
    return int(end.value.code or 0)


def test_it_writes_a_folder_and_says_so(tmp_path: Path, capsys):
    folder = tmp_path / "new" / "job"
    assert run("--to", "torchrun", "-o", str(folder), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert {Path(p).name for p in answer["files"]} == {p.name for p in folder.iterdir()}
    assert os.access(folder / "launch.sh", os.X_OK)
    assert not os.access(folder / "plan.json", os.X_OK)
    assert [p.name for p in folder.parent.iterdir()] == ["job"]


def test_nothing_is_replaced_without_force(tmp_path: Path, capsys):
    (tmp_path / "README.md").write_text("mine")
    assert run("--to", "fsdp", "-o", str(tmp_path)) == 2
    assert "--force" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"
    assert run("--to", "fsdp", "-o", str(tmp_path), "--force") == 0
    assert (tmp_path / "README.md").read_text().startswith("1. Install")


def test_a_plan_that_the_target_cannot_express_is_wrong_input(tmp_path: Path, capsys):
    assert run("--to", "fsdp", "--tp", "2", "-o", str(tmp_path / "x")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "strategy.tp" in error
    assert "nearest: " in error
    assert not (tmp_path / "x").exists()


def test_what_the_plan_leaves_open_is_as_the_target_needs_it_and_said(tmp_path: Path, capsys):
    assert run("--to", "deepspeed", "-o", str(tmp_path / "open")) == 0
    line = "Left open by the plan, chosen for DeepSpeed: strategy.framework = deepspeed."
    assert line in capsys.readouterr().err.splitlines()
    assert line in (tmp_path / "open" / "README.md").read_text().splitlines()
    assert run("--to", "deepspeed", "--framework", "deepspeed", "-o", str(tmp_path / "said")) == 0
    assert "Left open" not in capsys.readouterr().err
    assert run("--to", "deepspeed", "--framework", "fsdp2", "-o", str(tmp_path / "other")) == 2
    assert "nearest: strategy.framework = deepspeed" in capsys.readouterr().err
    one, other = tmp_path / "open", tmp_path / "said"
    assert (one / "ds_config.json").read_text() == (other / "ds_config.json").read_text()


def test_an_empty_name_is_no_folder(tmp_path: Path, capsys, monkeypatch):
    """What `-o "$JOB"` is where JOB was never set."""
    monkeypatch.chdir(tmp_path)
    assert run("--to", "fsdp", "-o", "") == 2
    assert "--output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_half_a_set_is_never_there(tmp_path: Path):
    folder = tmp_path / "set"
    with pytest.raises(SpecError):
        write_all(folder, {"a": "1", "b/c": "no such folder"}, force=False)
    assert list(tmp_path.iterdir()) == []


def test_an_older_torchtitan_gets_its_toml(tmp_path: Path):
    assert run("--to", "torchtitan", "--torchtitan-version", "0.2.0", "-o", str(tmp_path / "old")) == 0
    assert (tmp_path / "old" / "train.toml").exists()
    assert run("--to", "torchtitan", "--torchtitan-version", "latest", "-o", str(tmp_path / "new")) == 2


def test_the_help_names_every_target(capsys):
    with pytest.raises(SystemExit):
        main(["emit", "--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert set(TARGETS) <= set(words)
