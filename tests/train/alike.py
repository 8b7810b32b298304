"""One comparison of a layout with one device, as the tests of pipelines, context and experts make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from workers import Workers

Ranks = Callable[[int], Workers]
LOSS, GRADIENT = 2e-6, 1e-7


def size_of(strategy: dict[str, Any]) -> int:
    return int(np.prod([strategy.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")]))


_references: dict[tuple[Any, ...], dict[str, Any]] = {}


def compare(
    ranks: Ranks,
    model: str,
    strategy: dict[str, Any],
    training: dict[str, Any] | None = None,
    one: dict[str, Any] | None = None,
    *,
    loss: float = LOSS,
    gradient: float = GRADIENT,
    **more: Any,
) -> list[dict[str, Any]]:
    """The layout computes what one device computes: `one` is its strategy there. Returns the ranks' answers."""
    key = model, repr(training), repr(one), repr(more)
    if key not in _references:
        _references[key] = ranks(1)("deep:train", model, one or {"micro_batch_size": 8}, training, **more)[0]
    wanted = _references[key]
    found = ranks(size_of(strategy))("deep:train", model, strategy, training, **more)
    gradients: dict[str, np.ndarray] = {}
    for answer in found:
        assert answer["loss"] == found[0]["loss"], "ranks report different losses"
        gradients |= answer["gradients"]
    np.testing.assert_allclose(found[0]["loss"], wanted["loss"], rtol=0, atol=loss)
    assert set(wanted["gradients"]) <= set(gradients)
    for name, expected in wanted["gradients"].items():
        np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=gradient, err_msg=name)
    return found
