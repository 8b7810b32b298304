"""One folder, one registry; adding an entry is adding a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainwright.errors import SpecError
from trainwright.registry import Registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shapes_{tmp_path.name.replace('-', '_')}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(
        "class Shape:\n    def __init__(self, name, aliases=()):\n        self.name, self.aliases = name, aliases\n"
    )
    (package / "square.py").write_text("from .base import Shape\nSHAPE = Shape('square', ('quad_rat',))\n")
    (package / "rest.py").write_text("from .base import Shape\nSHAPE = [Shape('circle'), Shape('oval')]\n")
    (package / "_hidden.py").write_text("raise RuntimeError('never imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [m for m in sys.modules if m.startswith(name)]:
        del sys.modules[module]


def test_every_module_with_the_attribute_is_an_entry(folder: str) -> None:
    assert sorted(Registry(folder, "SHAPE", "shape")) == ["circle", "oval", "square"]


def test_a_new_file_is_a_new_entry(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder / "star.py").write_text("from .base import Shape\nSHAPE = Shape('star')\n")
    assert "star" in Registry(folder, "SHAPE", "shape")


def test_aliases_and_spelling(folder: str) -> None:
    shapes = Registry(folder, "SHAPE", "shape")
    assert shapes["Quad-Rat"] is shapes["square"]
    assert shapes.get_or_raise("SQUARE") is shapes["square"]


def test_an_unknown_name_is_refused_with_the_nearest(folder: str) -> None:
    with pytest.raises(SpecError, match=r"strategy.shape: unknown shape 'sqare' \(nearest: square"):
        Registry(folder, "SHAPE", "shape").get_or_raise("sqare", "strategy.shape")


def test_a_name_taken_twice_is_a_fault_of_the_program(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder / "again.py").write_text("from .base import Shape\nSHAPE = Shape('square')\n")
    with pytest.raises(RuntimeError, match="square"):
        list(Registry(folder, "SHAPE", "shape"))
