"""The documentation says what the program does: help pages, their examples, the README's tree."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.cli import main
from trainwright.train.scope import TorchMissing

ROOT = Path(__file__).parents[2]


def _generator():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMANDS = _generator().commands()


def examples(text: str) -> list[str]:
    joined = re.sub(r"\s+", " ", text)
    return [m.strip() for m in re.findall(r"Examples?: (trainwright .*?)(?= Example:|$)", joined)]


def test_the_page_of_commands_is_fresh() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_command_has_an_example_and_it_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = examples(COMMANDS[path].help or "")
    assert found, f"{path} has no example"
    for example in found:
        with pytest.raises(SystemExit) as stopped:
            main(shlex.split(example)[1:])
        said = capsys.readouterr().err
        without_the_extra = not importlib.util.find_spec("torch") and (stopped.value.code, said) == (2, f"trainwright: {TorchMissing()}\n")
        assert stopped.value.code in (0, 1) or without_the_extra, (example, said)


def test_the_tree_in_the_readme_is_the_source_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    folders = {p.name for p in (ROOT / "src" / "trainwright").iterdir() if p.is_dir() and p.name != "__pycache__"}
    tree = readme.split("src/trainwright/", 1)[1].split("```", 1)[0]
    named = set(re.findall(r"^\s+(\w+)/", tree, flags=re.MULTILINE))
    assert named == folders


def test_the_readmes_shell_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    known = {c.split()[1] for c in COMMANDS}
    for command in re.findall(r"^trainwright (\w[\w-]*)", readme, flags=re.MULTILINE):
        assert command in known, command
