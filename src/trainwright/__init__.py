"""Trainwright: how do I train this model on that cluster?

The public surface is `__all__`; names are loaded on first use, so that ``import trainwright`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "SpecError": "errors",
    "TrainwrightError": "errors",
    "RunSpec": "spec.run",
    "load": "api",
    "estimate": "api",
    "estimate_many": "api",
    "plan": "api",
    "schedule": "api",
    "collective_time": "api",
    "verify": "api",
    "check": "",
    "lesson": "",
    "simulate": "",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name] or name}")
    value = getattr(module, name) if _HOME[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
