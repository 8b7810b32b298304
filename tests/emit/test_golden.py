"""The files of one plan for each target, as they are. To accept a change: ``TRAINWRIGHT_GOLDEN=write pytest tests/emit/test_golden.py``, then read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.emit import TARGETS, emit

from .cases import BY_HAND, run_of

FOLDER = Path(__file__).parent / "golden"
# The README holds what the planner expects, the elastic script what still fits: both move with the planner. The script is its own golden copy.
MOVING = ("README.md", "launch_elastic.sh", "train_fsdp.py", "configmap.yaml")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_files_are_those_that_were_read_and_accepted(name):
    files = {k: v for k, v in emit(run_of(BY_HAND[name]), name).items() if k not in MOVING}
    folder = FOLDER / name
    if os.environ.get("TRAINWRIGHT_GOLDEN") == "write":
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    assert {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()} == files
