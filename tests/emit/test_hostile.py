"""Names and paths with quotes, spaces, ``$(...)``: they reach a program as they were typed, and no shell ever runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from trainwright.emit import TARGETS, Options, emit
from trainwright.emit.shell import quote, words
from trainwright.emit.yaml import dump, scalar
from trainwright.errors import SpecError

from .cases import BY_HAND, run_of

EVIL = [
    "a b",
    "it's",
    '"; touch CANARY; "',
    "$(touch CANARY)",
    "`touch CANARY`",
    "${IFS}x",
    "-rf",
    "a\\b",
    "é ☃",
    "#x",
    "!!python/object",
    "*",
    "~",
]
STUB = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["SEEN"], "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def execute(text: str, folder: Path) -> list[list[str]]:
    """Runs a script with every program that it starts replaced by one that notes its words."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("torchrun", "accelerate", "python", "srun", "scontrol", "scancel"):
        (tools / tool).write_text(STUB)
        (tools / tool).chmod(0o755)
    (folder / "run.sh").write_text(text)
    seen = folder / "seen"
    seen.touch()
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}", "SEEN": str(seen), "HEAD_NODE": "10.0.0.1", "NODE_RANK": "0", "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "0",
    }  # fmt: skip
    subprocess.run(["bash", "run.sh"], cwd=folder, env=environment, check=True, timeout=60)
    assert not (folder / "CANARY").exists()
    return [json.loads(line) for line in seen.read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_was_typed_arrives_and_nothing_runs(name, tmp_path: Path):
    for i in range(0, len(EVIL), 3):
        folder = tmp_path / str(i)
        folder.mkdir()
        evil, second, third = (EVIL[(i + k) % len(EVIL)] for k in range(3))
        options = Options(name=second, script=evil, output=third, nvme_path=second, image=third)
        run = run_of(BY_HAND[name])
        files = emit(run, name, options)
        text = files.get("launch.sh") or files.get("job.sbatch")
        if text is None and name == "skypilot":
            text = "set -e\n" + pytest.importorskip("yaml").safe_load(files["task.yaml"])["run"]
        if text is None:
            continue
        calls = execute(text, folder)
        engine = TARGETS[name] if TARGETS[name].engine is None else TARGETS[name].engine(run)
        program = TARGETS[name].program or (engine.program if engine else None)
        expected = program(run, options).arguments if program else [evil]
        assert any(call[-len(expected) :] == expected for call in calls)


def test_kubernetes_keeps_arguments_apart_and_unexpanded():
    yaml = pytest.importorskip("yaml")
    run = run_of({"strategy": {"framework": "deepspeed"}})
    for evil in EVIL:
        files = emit(run, "kubernetes", Options(name=evil, script=evil, image=evil))
        job = yaml.safe_load(files["trainjob.yaml"])
        assert job["spec"]["trainer"]["args"][0].replace("$$(", "$(") == evil
        assert "$(" not in job["spec"]["trainer"]["args"][0].replace("$$(", "")
        assert job["spec"]["trainer"]["image"] == evil
        assert job["metadata"]["name"].replace("-", "").isalnum()
        assert yaml.safe_load(files["configmap.yaml"])["data"]["ds_config.json"].startswith("{")


def test_the_batch_directives_take_plain_names_only():
    for evil in EVIL:
        text = emit(run_of({}), "slurm", Options(name=evil))["job.sbatch"]
        first = text.splitlines()[1]
        assert first.startswith("#SBATCH --job-name=")
        assert set(first.split("=", 1)[1]) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def test_control_characters_are_refused():
    with pytest.raises(SpecError, match="control characters"):
        emit(run_of({"strategy": {"framework": "deepspeed"}}), "deepspeed", Options(script="a\nb"))


def test_quoting_is_undone_by_reading():
    for evil in EVIL:
        assert words(f"run {quote(evil)} # a comment isn't read\n") == ["run", evil]
    assert words("echo 'never closed") == []


def test_yaml_scalars_come_back_as_they_were():
    yaml = pytest.importorskip("yaml")
    values = [
        *EVIL,
        "",
        " ",
        "yes",
        "No",
        "null",
        "~",
        "1e5",
        "0x1F",
        "1_000",
        "12:30:00",
        "2026-01-01",
        "- a",
        "a: b",
        "\u2028",
        "\x85",
        "\ufeff",
        "\U0001f600",
    ]
    values += ["2026-01-01", "a\nb", "a\n\n b\n", "\n", " a\n", "tab\there\nx", "trailing \nspace", "a\n\n"]
    document = {"texts": values, "numbers": [1, -2.5, 1e-5, 3e22, True, False, None], "nested": {"x y": [[1, 2], {"a": {}}], "empty": []}}
    assert yaml.safe_load(dump(document)) == document
    assert scalar("plain") == "plain"
