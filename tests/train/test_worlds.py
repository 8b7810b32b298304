"""What is left of a world of ranks once it is closed: nothing, or each world of a session would slow the ones after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from workers import Workers

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "sharding": "zero3"},
    "tensor": {"tp": 2, "sequence_parallel": True},
    "pipeline": {"pp": 2, "micro_batch_size": 1},
    "context": {"cp": 2},
}


def threads(workers: Workers) -> list[int]:
    """Of each rank: a gloo group has three of its own."""
    assert workers.process is not None
    children = Path(f"/proc/{workers.process.pid}/task/{workers.process.pid}/children").read_text().split()
    return [len(list(Path(f"/proc/{child}/task").iterdir())) for child in children]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_group_outlives_its_world(ranks: Callable[[int], Workers], name: str) -> None:
    """DTensor's caches held every mesh, and so every group: after two hundred worlds a rank had six hundred threads, a third of them spinning."""
    ranks(2)("layouts:train", "gpt", {"micro_batch_size": 2, **LAYOUTS[name]}, steps=1)
    before = threads(ranks(2))
    ranks(2)("layouts:train", "gpt", {"micro_batch_size": 2, **LAYOUTS[name]}, steps=1)
    assert threads(ranks(2)) == before
    assert max(before) < 6
