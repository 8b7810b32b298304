"""Running the command line in this process: its status, what it prints, and what it must never print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from trainwright.cli import main


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err + out
        return Ran(int(stopped.value.code or 0), out, err)

    return call


@pytest.fixture
def refused(run: Callable[..., Ran]) -> Callable[..., str]:
    """Runs what must be refused: one line on stderr, nothing on stdout, status 2. Returns the line."""

    def call(*arguments: str) -> str:
        ran = run(*arguments)
        assert (ran.status, ran.out) == (2, ""), ran
        assert len(ran.err.splitlines()) == 1, ran.err
        return ran.err

    return call
