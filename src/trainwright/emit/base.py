"""The form that a target's file fills in: what it writes, what it reads back, what it says, what it cannot say.

Every field of a run spec is, for every target, one of three things: *said* (a key of the emitted files holds it, and the reader returns it),
*limited* (only some values can be run there; others are refused with the nearest plan that can), or *left* (nothing in files of this kind holds
it; the README names each such field that is not at its default, because the user's own code has to do it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..resolve import Run

Files = dict[str, str]
Changes = dict[str, Any]  # dotted field of the run spec -> value


@dataclass(frozen=True)
class Options:
    """What files need and a plan does not hold. Every text may be anything: it is quoted where it is written."""

    name: str = "trainwright"  # of the job
    script: str = "train.py"  # the user's own training program, for targets that configure one
    output: str = "outputs"  # where checkpoints go
    learning_rate: float = 3e-4
    schedule: str | None = None  # constant, linear, cosine; None: the target's own choice (`rate`)
    warmup_steps: int | None = None
    least_learning_rate: float | None = None  # where the rate ends
    clip: float = 1.0  # norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW and Lion
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.1
    image: str = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"  # container, for Kubernetes
    nvme_path: str = "/local_nvme"
    port: int = 29500
    checkpoint_steps: int = 500
    minutes: int = 2880  # wall-clock limit of a batch job
    torchtitan_version: str = "0.3.0"


@dataclass(frozen=True)
class Limit:
    """A field of which the target can express only some values.

    `allows(run)`; `why` one sentence without the value; `change(run)` the fields to set for the nearest plan that the target can express.
    """

    field: str
    allows: Callable[[Run], bool]
    why: str
    change: Callable[[Run], Changes]


@dataclass(frozen=True)
class Setting:
    """An environment variable that the plan relies on, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Target:
    """One engine, launcher or scheduler.

    * `write(run, options)` -> {file name: text}, for a run that `limits` allow;
    * `read(files)` -> the part of a run spec that such files say, None where the files are of another kind;
    * `says`: dotted fields that `read` returns for every emitted set (where `conditional` says no otherwise);
    * `leaves`: fields that files of this kind do not hold;
    * `program`: what every rank runs, so that launchers can start it; `engine(run)`: the target whose files a launcher adds to its own;
    * `install`, `command`: the first two lines of the README, from the same options;
    * `settings(run)`: environment variables of this target beyond those of every run.
    """

    name: str
    title: str
    write: Callable[[Run, Options], Files]
    read: Callable[[Mapping[str, str]], dict[str, Any] | None]
    limits: tuple[Limit, ...]
    says: tuple[str, ...]
    leaves: tuple[str, ...]
    install: Callable[[Run, Options], str]
    command: Callable[[Run, Options], str]
    aliases: tuple[str, ...] = ()
    program: Callable[[Run, Options], Any] | None = None  # launch.Program: what every rank runs
    engine: Callable[[Run], Target | None] | None = None  # whose files stand beside its own
    settings: Callable[[Run], Iterable[Setting]] = lambda run: ()
    settle: Callable[[Run], Changes] = lambda run: {}  # sizes that the writer works out, written into the plan before it is emitted
    source: str = ""


def get(run: Run, field: str) -> Any:
    """The value of a dotted field of the filled run spec; None where it does not apply."""
    return dig(run.filled, field)


def dig(document: Mapping[str, Any], field: str) -> Any:
    found: Any = document
    for key in field.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def put(document: dict[str, Any], field: str, value: Any) -> None:
    """Sets a dotted field; None removes it."""
    *path, last = field.split(".")
    for key in path:
        document = document.setdefault(key, {})
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


def whole(found: Any, otherwise: Any = None) -> Any:
    """A whole number, or `otherwise` where something else stands ("auto", null, a list)."""
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else otherwise


def table(found: Any) -> dict[str, Any]:
    """A mapping, an empty one where something else stands."""
    return dict(found) if isinstance(found, Mapping) else {}


def said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """{"strategy.tp": 8} -> {"strategy": {"tp": 8}}; fields that are None are left out."""
    document: dict[str, Any] = {}
    for field, value in fields.items():
        if value is not None:
            put(document, field, value)
    return document


def only(field: str, values: Iterable[Any], why: str) -> Limit:
    """The target can express only these values; the nearest is the first, or of numbers the closest."""
    choices = tuple(values)

    def change(run: Run) -> Changes:
        now = get(run, field)
        if isinstance(now, (int, float)) and not isinstance(now, bool) and all(isinstance(c, (int, float)) for c in choices):
            return {field: min(choices, key=lambda c: abs(c - now))}
        return {field: choices[0]}

    return Limit(field, lambda run: get(run, field) in choices, why, change)


def when(condition: Callable[[Run], bool], limit: Limit) -> Limit:
    """The limit holds only where `condition` does."""
    return Limit(limit.field, lambda run: not condition(run) or limit.allows(run), limit.why, limit.change)
