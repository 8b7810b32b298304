"""Where answers go that nobody reads on a Unicode terminal: consoles of other encodings, closed streams, terminals without a size."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCHEDULE = f"{sys.executable} -m trainwright schedule 1f1b --stages 2 --microbatches 2"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", command], capture_output=True, env={**os.environ, **environment}, check=False, timeout=60)


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "cp1252"}, C_LOCALE], ids=["cp1252", "C"])
def test_a_timeline_is_drawn_where_its_fills_cannot_be_encoded(environment: dict[str, str]) -> None:
    done = shell(SCHEDULE, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode("cp1252").splitlines()
    assert lines[1].startswith("rank 0 F0---")  # forward passes are told from backward ones
    assert "B0%%%" in lines[1]
    assert "?" not in lines[1]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    done = shell(f"{SCHEDULE} {closed}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (b"makespan" in done.stdout) == (closed != ">&-")


def test_no_columns_means_that_nobody_knows_how_many() -> None:
    assert shell(SCHEDULE, COLUMNS="0").stdout == shell(f"unset COLUMNS; {SCHEDULE}").stdout
