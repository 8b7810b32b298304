"""`ranks(size)`: the session's gloo ranks of that world size (see workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Workers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Workers]]:
    made: dict[int, Workers] = {}
    try:
        yield lambda size: made.setdefault(size, Workers(size))
    finally:
        for workers in made.values():
            workers.stop()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` one xdist process owns all ranks, however many processes share the tests."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
