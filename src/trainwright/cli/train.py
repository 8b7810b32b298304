"""``trainwright train``: a real run with PyTorch on what this machine has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..train.settings import Settings
from .plan import Json

if TYPE_CHECKING:
    from ..resolve import Run
    from ..train.launch import End, Place

OWN = ("output", "resume")  # have options of their own


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option for every field of `Settings`; its `said` parameter receives those that were given."""
    own = [p for n, p in inspect.signature(command, eval_str=True).parameters.items() if n != "said"]
    chosen = [f for f in fields(Settings) if f.name not in OWN]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        given = {f.name: values.pop(f.name) for f in chosen}
        return command(said={k: v for k, v in given.items() if v is not None}, **values)

    def parameter(f: Any) -> inspect.Parameter:
        kind, flag = type(f.default), "--" + f.name.replace("_", "-")
        flags = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
        default = f.default if f.default != "" else "none"
        text = f"{f.metadata['help'][0].upper()}{f.metadata['help'][1:]}." + ("" if kind is bool or default == "none" else f" [{default}]")
        option = typer.Option(None, *flags, help=text, show_default=False)
        return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)

    signature = inspect.Signature([*own, *map(parameter, chosen)])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


@takes_settings
def train(
    said: dict[str, Any],
    plan: Annotated[str, typer.Argument(help="A run spec (TOML, JSON or -); left out: a tiny plan.", show_default=False)] = "",
    output: Annotated[str | None, typer.Option("-o", "--output", help="Folder of the run [runs/NAME].", show_default=False)] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on with the run in this folder.", show_default=False)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any key of the run spec.", show_default=False)] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    node: Annotated[int, typer.Option("--node", min=0, help="Which of them this is.")] = 0,
    rendezvous: Annotated[str, typer.Option("--rendezvous", help="HOST:PORT of machine 0.", show_default=False)] = "",
    restarts: Annotated[int, typer.Option("--restarts", min=0, max=100_000, help="How often what was killed is started again.")] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="One rank of the plan's true size on fake tensors; nothing is trained.")
    ] = False,
    json_: Json = False,
) -> int:
    """Train with PyTorch on what this machine has, in the layout of the plan; without a plan, a tiny model on the embedded text.

    A run can be killed at any moment: it is started again, or goes on with --resume, from its last whole checkpoint. SIGTERM saves and ends with 0.
    A plan file may hold the options below in a table [train]. Needs the extra: pip install 'trainwright[train]'

    Example: trainwright train --steps 3 -o runs/tiny

    Example: trainwright train --dry-run
    """
    from ..train.launch import Place
    from ..train.scope import require_torch
    from .output import require_name

    require_torch()
    require_name(output, "folder")
    document, base = read_plan(plan, resume)
    run = resolved(document, set_ or [])
    if dry_run:
        return report_dry_run(run, json_)
    folder = Path(resume or output or base.get("output") or f"runs/{name_of(run) if plan else 'tiny'}")
    place = Place(nodes, node, rendezvous, restarts)
    return start(run, folder, {**base, **said, "output": str(folder)}, place, resumed=bool(resume), json_=json_)


def read_plan(plan: str, resume: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run spec and the settings that come with it: of the plan, over those of the run that is resumed, over the tiny plan's."""
    from importlib import resources

    from ..api import parse_document
    from ..errors import SpecError
    from ..train.files import read_run
    from .output import read_text

    before = read_run(Path(resume)) if resume else None
    if plan:
        document = parse_document(read_text(plan), "stdin" if plan == "-" else plan)
    elif before is not None:
        document = dict(before["spec"])
    else:
        document = parse_document(resources.files("trainwright.train").joinpath("tiny.toml").read_text(), "tiny.toml")
    table = document.pop("train", {})
    if not isinstance(table, dict):
        raise SpecError("is no table", "train")
    return document, {**(before["settings"] if before else {}), **table}


def resolved(document: dict[str, Any], assignments: list[str]) -> Run:
    from ..api import load
    from ..resolve import resolve
    from ..search.constraints import check_plan
    from .options import set_keys

    run = resolve(load(set_keys(document, assignments)))
    check_plan(run.model, run.cluster, run.job, run.plan)
    return run


def name_of(run: Run) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in run.model.name)[:60] or "run"


def start(run: Run, folder: Path, settings: dict[str, Any], place: Place, *, resumed: bool, json_: bool) -> int:
    from ..errors import SpecError
    from ..report.progress import RunView
    from ..train.engines import engine_of
    from ..train.files import CHECKPOINTS
    from ..train.launch import Launch, check_place, check_sources, resume_command, settings_of, uses_gpu, write_folder
    from ..train.whole import step_folders, step_of
    from .output import console

    chosen = settings_of(settings, {})
    engine = engine_of(run, chosen)
    engine.check(run, chosen, uses_gpu(chosen))
    ranks = check_place(run, chosen, place)
    there = step_folders(folder / CHECKPOINTS)
    if there and not resumed:
        raise SpecError(f"holds a run already (step {step_of(there[0])})", str(folder), [resume_command(folder), "-o another folder"])
    if chosen.export and place.node == 0:
        from ..train.export import check_target

        check_target(Path(chosen.export))
    check_sources(run, replace(chosen, init="") if there else chosen)  # whoever goes on has its weights
    if place.node == 0:
        write_folder(folder, run, chosen)
    environment = engine.prepare(run, chosen, lambda line: console(stderr=True).print(line, soft_wrap=True, markup=False))
    view = RunView(console(stderr=True), name_of(run), chosen.steps)
    try:
        end = Launch(folder, ranks, place, view.see, environment).run()
    finally:
        view.close()
    if chosen.profile and end.status == 0:
        from ..api import estimate
        from ..report.run_trace import write_run_trace

        if trace := write_run_trace(folder, estimate(run.filled)):
            console(stderr=True).print(f"trace for ui.perfetto.dev: {trace}", soft_wrap=True)
    if chosen.export and end.word == "done" and place.node == 0:
        from ..train.export import export

        export(folder, Path(chosen.export))
        console(stderr=True).print(f"exported: {chosen.export}", soft_wrap=True)
    return tell(end, folder, view.last, json_)


def tell(end: End, folder: Path, last: dict[str, Any], json_: bool) -> int:
    """The end of a run for people, or as one JSON document; the exit status."""
    from ..train.launch import resume_command
    from .output import console, print_json

    hint = resume_command(folder) if end.saved is not None and end.word != "done" else None
    if json_:
        print_json({**vars(end), "folder": str(folder), "resume": hint, "last": last or None})
        return end.status
    err = console(stderr=True)
    if end.word in ("done", "stopped"):
        loss = f", loss {end.loss:.4f}" if isinstance(end.loss, float) else ""
        said = "done" if end.word == "done" else "stopped as asked, saved"
        err.print(f"{said}: step {end.step}{loss}; {folder}", soft_wrap=True)
    else:
        kept = f"; step {end.saved} is saved" if end.saved is not None else ""
        err.print(f"trainwright: {end.message}{kept}", soft_wrap=True, markup=False)
    if hint:
        err.print(f"go on with: {hint}", soft_wrap=True)
    return end.status


def report_dry_run(run: Run, json_: bool) -> int:
    from ..api import estimate
    from ..report.dry_run import dry_run_dict, dry_run_text
    from ..train.dry import dry_run
    from ..train.engines import ENGINES, NATIVE
    from .output import console, print_json
    from .plan import _waiting

    ENGINES[NATIVE].check(run, Settings(), False)  # no other engine's code runs on fake tensors
    expected = estimate(run.filled)
    fullest = int(expected.table.memory.pipeline_rank[expected.index]) * (
        run.plan.gpus // run.plan.pp
    )  # pp is the outermost axis of the ranks
    with _waiting("building one rank on fake tensors"):
        found = dry_run(run, fullest)
    if json_:
        print_json(dry_run_dict(found, expected))
    else:
        dry_run_text(console(), found, expected)
    return 0


def register(app: typer.Typer) -> None:
    app.command()(train)
