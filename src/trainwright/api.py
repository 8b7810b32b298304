"""The library's verbs: load, estimate, plan, schedule, collective_time. Joins the layers below; holds no equation of its own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SpecError, TrainwrightError, expect, one_line
from .spec.run import ClusterSection, RunSpec, validate

if TYPE_CHECKING:
    from .check.run import Report
    from .cost.estimate import Estimate
    from .emit import Options
    from .measure.calibrate import Profile
    from .measure.real import RealVerification
    from .measure.verify import Verification
    from .resolve import Run, Task
    from .schedules.replay import Result
    from .search.rank import Ranking

Source = str | Path | Mapping[str, Any] | RunSpec
MAX_TEXT = 10_000_000


def load(source: Source) -> RunSpec:
    """A run spec from a path, a dict, or JSON or TOML text. Raises `SpecError` on anything wrong."""
    if isinstance(source, RunSpec):
        return source
    if isinstance(source, Mapping):
        return validate(dict(source))
    if not isinstance(source, (str, Path)):
        raise SpecError(f"{type(source).__name__} is no run spec: a path, a dict, or JSON or TOML text is")
    text, where = _text(source)
    return validate(parse_document(text, where))


def _text(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or source.lstrip()[:1] in ("{", "[")):
        return source, "text"
    path = Path(source)
    try:
        if path.is_dir():
            raise SpecError("is a folder, a run spec is a file", str(source))
        if path.stat().st_size > MAX_TEXT:
            raise SpecError(f"is larger than {MAX_TEXT:,} bytes", str(source))
        return path.read_bytes().decode("utf-8-sig"), str(source)
    except UnicodeDecodeError:
        raise SpecError("is not text (UTF-8)", str(source)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "strerror", None) or "is not a path"
        raise SpecError(f"cannot be read: {reason}", one_line(source, 120)) from None


def parse_document(text: str, where: str) -> dict[str, Any]:
    """JSON or TOML text -> dict; the first broken place is named."""
    is_json = where.lower().endswith(".json") or (
        not where.lower().endswith(".toml") and text.lstrip()[:1] in ("{", "[") and not _looks_like_toml(text)
    )
    if not text.strip():
        raise SpecError("is empty", where)
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _without_doubles(pairs, where)) if is_json else tomllib.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"is no JSON: {error.msg} (line {error.lineno}, column {error.colno})", where) from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is no TOML: {one_line(error)}", where) from None
    except RecursionError:
        raise SpecError("is nested too deeply", where) from None
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError("holds a number too long or a character that is none", where) from None
    if not isinstance(found, dict) or not found:
        raise SpecError("holds no table" if found else "is empty", where)
    return found


def _without_doubles(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """A JSON object; a key said twice is refused, as in TOML: nobody could tell which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [k for k, _ in pairs]
        raise SpecError(f"says {next(k for k in names if names.count(k) > 1)[:80]!r} twice", where)
    return found


def _looks_like_toml(text: str) -> bool:
    """A table's head, whole or not: no JSON list is a document."""
    return text.lstrip()[:1] == "[" and text.lstrip()[1:2].isalpha()


def estimate(spec: Source, *, catalog_files: tuple[str, ...] = (), profile: Profile | None = None) -> Estimate:
    """One fully specified run -> `Estimate`; what `[strategy]` leaves open takes the documented default. `profile`: `measure.calibrate`."""
    return estimate_many([spec], catalog_files=catalog_files, profile=profile)[0]


def estimate_many(specs: Iterable[Source], *, catalog_files: tuple[str, ...] = (), profile: Profile | None = None) -> list[Estimate]:
    """The same answers as `estimate`, in order; specs that share model, cluster and training are one table."""
    from .resolve import resolve
    from .search.constraints import check_plan

    expect(Iterable, "a list of run specs", specs=specs)
    runs = [resolve(load(s), catalog_files) for s in specs]
    for run in runs:
        check_plan(run.model, run.cluster, run.job, run.plan)
    answers: list[Estimate | None] = [None] * len(runs)
    for indices in _same_job(runs):
        for i, answer in zip(indices, _estimate_group([runs[i] for i in indices], profile), strict=True):
            answers[i] = answer
    return [a for a in answers if a is not None]


def verify(spec: Source, *, tolerance_bytes: int | None = None, catalog_files: tuple[str, ...] = ()) -> Verification:
    """Memory and messages of one rank, predicted beside what PyTorch itself does on fake tensors: no GPU, no data, the plan's true world size.

    Needs the extra ``train``; raises `train.scope.TorchMissing` without it and `SpecError` for a run that PyTorch cannot be asked about.
    """
    from .measure.verify import TOLERANCE_BYTES, Verification
    from .resolve import resolve
    from .train.scope import measurable, require_torch

    run = resolve(load(spec), catalog_files)
    predicted = estimate(run.spec, catalog_files=catalog_files)
    measurable(run)
    require_torch()
    from .train.probe import probe

    return Verification(predicted, probe(run), TOLERANCE_BYTES if tolerance_bytes is None else tolerance_bytes)


def verify_real(spec: Source, **options: Any) -> RealVerification:
    """One run for real on this machine, beside its estimate: losses, gradients, collectives, step times (`train.verify.verify_real`'s options).

    Needs the extra ``train``; raises `SpecError` for a run with more ranks than this machine has devices.
    """
    from .train.verify import verify_real as hold

    document = load(spec).model_dump(exclude_none=True) if not isinstance(spec, Mapping) else spec
    return hold(document, lambda d, files: estimate(d, catalog_files=files), **options)


def _same_job(runs: Sequence[Run]) -> Iterator[list[int]]:
    """Indices of runs that differ in their layout only, frameworks apart: a profile has a factor for each."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        model = run.spec.model if isinstance(run.spec.model, str) else json.dumps(run.spec.model, sort_keys=True, default=str)
        key = f"{model}|{run.cluster!r}|{run.job!r}|{run.plan.structure.framework}"
        groups.setdefault(key, []).append(i)
    yield from groups.values()


def _estimate_group(runs: Sequence[Run], profile: Profile | None) -> list[Estimate]:
    from .cost.estimate import evaluate
    from .cost.table import PlanTable
    from .search.constraints import advise

    first = runs[0]
    factor = profile.factor(first.cluster.gpu.id, first.plan.structure.framework) if profile else 1.0
    table = evaluate(first.model, first.cluster, first.job, PlanTable.from_plans([r.plan for r in runs]), factor)
    advice = [advise(r.model, r.cluster, r.job, r.plan) for r in runs]
    return [table.row(i, r.filled, warnings=(*r.warnings, *advice[i]), assumed=r.assumed) for i, r in enumerate(runs)]


class Plans(Sequence["Estimate"]):
    """The answer of `plan`: `Estimate`s, best first; empty where nothing fits.

    `removed` {rule: plans that it removed}, `searched` how many layouts were considered, `suggestion` the cheapest change that fits (None where
    something does), `reasons` why the first one is first.
    """

    def __init__(self, ranking: Ranking, estimates: Sequence[Estimate], task: Task) -> None:
        self._ranking, self._estimates, self._task = ranking, list(estimates), task
        self.removed: dict[str, int] = dict(ranking.removed)
        self.searched: int = ranking.searched
        self.suggestion = ranking.suggestion
        self.assumed = task.assumed
        self.warnings = task.warnings

    def __getitem__(self, i: Any) -> Any:
        return self._estimates[i]

    def __len__(self) -> int:
        return len(self._estimates)

    def __repr__(self) -> str:
        """A line a plan."""
        lines = [f"<{len(self)} plans of {self.searched:,} layouts>", *(f"  {i + 1}. {e!r}" for i, e in enumerate(self))]
        return "\n".join([*lines, f"  nothing fits; what would: {self.suggestion}"] if not len(self) else lines)

    def to_dict(self) -> dict[str, Any]:
        """{"plans": [estimate, ...], "removed", "searched", "suggestion", "assumed", "warnings"}."""
        return {
            "plans": [e.to_dict() for e in self._estimates],
            "removed": self.removed,
            "searched": self.searched,
            "suggestion": self.suggestion,
            "assumed": list(self.assumed),
            "warnings": list(self.warnings),
        }


def plan(
    spec: Source,
    *,
    top: int = 10,
    objective: str = "time",
    max_cost: float | None = None,
    deadline_s: float | None = None,
    max_gpus: int | None = None,
    catalog_files: tuple[str, ...] = (),
    profile: Profile | None = None,
) -> Plans:
    """The open fields of ``[strategy]`` searched, whole. `objective` is time, cost or memory; max_cost in US dollars, deadline in seconds."""
    from .resolve import resolve_task
    from .search.pricing import calibrated
    from .search.rank import SearchOptions, search

    expect(int, "a whole number of plans", top=top)
    expect(int, "a whole number of GPUs", max_gpus=1 if max_gpus is None else max_gpus)
    expect(tuple | list, "a list of files", catalog_files=catalog_files)
    task = resolve_task(load(spec), catalog_files)
    options = SearchOptions(top=top, objective=objective, max_cost=max_cost, deadline_s=deadline_s, max_gpus=max_gpus)
    factor = profile.factor(task.cluster.gpu.id, task.framework.name) if profile else 1.0
    ranking = search(task.model, task.cluster, task.job, task.spec.strategy, options, calibrated(factor) if profile else None)
    return Plans(ranking, _ranked(task, ranking, factor), task)


def _ranked(task: Task, ranking: Ranking, factor: float) -> list[Estimate]:
    """The ranked plans as estimates. Plans on fewer GPUs than the cluster has are priced on a cluster of that size."""
    import numpy as np

    from .cost.estimate import evaluate
    from .resolve import filled_spec
    from .search.constraints import advise

    by_size: dict[int, list[int]] = {}
    for i, cluster in enumerate(ranking.clusters):
        by_size.setdefault(cluster.gpus, []).append(i)
    found: dict[int, Estimate] = {}
    for rows in by_size.values():
        cluster = ranking.clusters[rows[0]]
        table = evaluate(task.model, cluster, task.job, ranking.plans.take(np.array(rows)), factor)
        for k, i in enumerate(rows):
            plan = table.plans.plan(k)
            warnings = (*task.warnings, *advise(task.model, cluster, task.job, plan))
            spec = filled_spec(task.spec, cluster, task.job, plan)
            found[i] = table.row(k, spec, reasons=tuple(ranking.reasons[i]), warnings=warnings, assumed=task.assumed)
    return [found[i] for i in sorted(found)]


def emit(spec: Source, target: str, options: Options | None = None, *, catalog_files: tuple[str, ...] = ()) -> dict[str, str]:
    """{file name: text} that runs one run on a target. What the spec leaves open is as the target needs it (the README says what); what the spec says
    and the target cannot express raises `SpecError` with the nearest plan."""
    from .emit import emit as files
    from .emit import suited
    from .resolve import resolve
    from .search.constraints import check_plan

    run, chosen = suited(resolve(load(spec), catalog_files), target)
    check_plan(run.model, run.cluster, run.job, run.plan)
    return files(run, target, options, chosen)


def check(
    files: Mapping[str, str | bytes],
    *,
    launch: str = "",
    model: str | Mapping[str, Any] | None = None,
    on: str | Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
) -> Report:
    """What is wrong with the configuration files of one run (name -> text), most severe first; nothing of them is run.

    `launch` is the command that starts the run (it overrides the files), `model` and `on` (``8xA100``) what they do not say. `Report` has
    `findings`, `has_errors`, `to_dict`. Raises `SpecError` where the model or the cluster is unknown.
    """
    from .check.run import check as checked

    return checked(files, launch, model, on, ignore)


def schedule(
    name: str,
    stages: int,
    microbatches: int,
    virtual_stages: int | None = None,
    forward: float = 1,
    backward: float = 2,
    weight: float = 0,
    p2p: float = 0,
    **more: Any,
) -> Result:
    """A pipeline schedule replayed (contract section 2); `virtual_stages` None is the schedule's own least.

    Costs are one rank's whole share of one microbatch; `backward` is the input gradient.
    """
    from .schedules.replay import schedule as replay

    expect(str, "a name", name=name)
    return replay(name, stages, microbatches, virtual_stages, forward=forward, backward=backward, weight=weight, p2p=p2p, **more)


def collective_time(kind: str, bytes: float, cluster: str | Mapping[str, Any], gpus: int, algorithm: str | None = None) -> float:
    """Seconds of one collective; `bytes` is the whole message (contract section 2)."""
    from .catalog.load import build_cluster
    from .cost.collectives import collective_time as seconds

    expect(str, "a name", kind=kind, algorithm="" if algorithm is None else algorithm)
    expect(int | float, "a number of bytes", bytes=bytes)
    expect(int, "a whole number of GPUs", gpus=gpus)
    spec = validate(
        {"model": "7B", "cluster": cluster if isinstance(cluster, str) or not isinstance(cluster, Mapping) else dict(cluster)}
    ).cluster
    return float(seconds(kind, bytes, build_cluster(spec), gpus, algorithm))


__all__ = [
    "ClusterSection",
    "Plans",
    "TrainwrightError",
    "check",
    "collective_time",
    "emit",
    "estimate",
    "estimate_many",
    "load",
    "plan",
    "schedule",
]
