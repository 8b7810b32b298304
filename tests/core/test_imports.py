"""Every module can be the first that somebody imports: no ring of imports, which would work from one end and fail from another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import trainwright

ROOT = Path(trainwright.__file__).parent
MODULES = {
    ".".join(("trainwright", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")
}


def imported(name: str) -> Iterator[str]:
    """What runs first when a module is imported: the modules that it names outside of functions, and the packages around them that it is not in itself."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in _at_once(ast.parse(MODULES[name].read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{source}.{a.name}" if f"{source}.{a.name}" in MODULES else source for a in node.names]
        else:
            targets = [a.name for a in node.names]
        for target in targets:
            parts = target.split(".")
            around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
            yield from (m for m in around if m in MODULES and m != name and not name.startswith(f"{m}."))


def _at_once(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _at_once([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _at_once(node.body)


def test_no_ring_of_imports() -> None:
    graph = {name: set(imported(name)) for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
