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
