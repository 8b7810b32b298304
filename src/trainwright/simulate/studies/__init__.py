"""Studies: one file each shows what a strategy computes, sends and holds, on real numbers. See `trainwright.simulate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...registry import Registry
from ..report import Report


@dataclass(frozen=True)
class Study:
    """An entry of the registry. `run`'s parameters, ``Annotated[type, "what it is"]`` with defaults, are the options of the command line."""

    name: str
    run: Callable[..., Report]
    example: str
    aliases: tuple[str, ...] = ()


STUDIES = Registry("trainwright.simulate.studies", "STUDY", "simulation")
