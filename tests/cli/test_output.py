"""Where answers go that nobody reads on a Unicode terminal: files, pipes and consoles of other encodings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_bar_is_drawn_where_its_fills_cannot_be_encoded(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainwright", "schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"},
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode(encoding).splitlines()
    assert lines[1].startswith("rank 0 F0---")  # forward passes are told from backward ones
    assert "B0%%%" in lines[1]
    assert "?" not in lines[1]
