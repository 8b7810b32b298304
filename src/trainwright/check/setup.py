"""What all the files and the launch line say together, in the run spec's own words, each value with the place where it stands.

A value that two files give is kept twice: checks compare them, and `Setup.value` answers with the one that wins (launch line, environment, file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .document import Document, Path

if TYPE_CHECKING:
    from .view import View


@dataclass(frozen=True)
class Place:
    """Where a value stands: the document's name, its line and key path."""

    file: str
    line: int | None = None
    path: Path = ()

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Fact:
    """One value of one field as one file gives it.

    `field`: a dotted field of the run spec (``training.seq_len``, ``strategy.tp``) or one of `EXTRA`. `rank`: higher wins (file 0, environment 1,
    launch line 2). `raw` is what the file says before units and names were translated ("auto" stays "auto" there).
    """

    field: str
    value: Any
    place: Place
    raw: Any = None
    rank: int = 0


EXTRA: Mapping[str, str] = {
    "launch.nodes": "machines",
    "launch.gpus_per_node": "GPUs (or tasks x processes) of a machine",
    "launch.world_size": "processes in all",
    "launch.main_address": "rendezvous host",
    "launch.timeout_s": "time limit of a collective",
    "launch.visible_gpus": "GPUs that CUDA_VISIBLE_DEVICES leaves",
    "cluster.constraint": "the scheduler's word for a kind of node",
    "training.samples": "sequences of the whole run",
    "training.accumulation": "micro-batches of a step and replica",
    "training.learning_rate": "peak learning rate",
    "training.steps": "optimizer steps",
    "training.lr_schedule": "how the learning rate falls: constant, linear, cosine, or another name as the file has it",
    "training.least_learning_rate": "where the learning rate ends",
    "training.warmup_steps": "steps of warm-up",
    "training.warmup_share": "share of all steps that is warm-up",
    "training.decay_steps": "steps until the rate is at its end",
    "training.clip": "norm that gradients are clipped to",
    "training.loss_scale": "0 = dynamic",
    "model.<key>": "a key of config.json that the file states (hidden_size, num_hidden_layers, ...)",
    "model.name": "the base model as the file names it",
}


@dataclass(frozen=True)
class Reading:
    """What one format made of one document.

    `unknown`: key paths that the format does not list (`known.keys(format)` has the lists); `open`: paths that only the launch line, the environment or the
    Trainer can fill ("auto",
    ``${...}``, placeholders); `fragment`: the file is meant to be joined with others, so what is missing in it is no fault.
    """

    document: Document
    format: str
    facts: tuple[Fact, ...] = ()
    unknown: tuple[Path, ...] = ()
    open: tuple[Path, ...] = ()
    fragment: bool = False
    template: bool = False


@dataclass(frozen=True)
class Setup:
    """Every reading of one call, joined; `asked` holds what the command line said (model, cluster)."""

    readings: tuple[Reading, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)

    def facts(self, name: str) -> tuple[Fact, ...]:
        """All that say something of the field, the winner first."""
        found = [f for r in self.readings for f in r.facts if f.field == name]
        return tuple(sorted(found, key=lambda f: -f.rank))

    def fact(self, name: str) -> Fact | None:
        return next(iter(self.facts(name)), None)

    def value(self, name: str, otherwise: Any = None) -> Any:
        found = self.fact(name)
        return otherwise if found is None else found.value

    def of(self, *formats: str) -> Iterator[Reading]:
        """The readings of these formats."""
        return (r for r in self.readings if r.format in formats)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What a check worked out that others need too (the estimate)."""
        return {}

    @cached_property
    def views(self) -> tuple[View, ...]:
        """Every reading with its values by name; templates and broken files are left out, nobody can tell what they say."""
        from .view import View

        return tuple(View(r) for r in self.readings if not r.template)

    def seen(self, *formats: str) -> Iterator[View]:
        """The views of these formats; of all without one."""
        return (v for v in self.views if not formats or v.format in formats)
