"""``trainwright plan | estimate | memory``: the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Request, takes_run

if TYPE_CHECKING:
    from ..api import Plans

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Csv = Annotated[bool, typer.Option("--csv", help="The table as comma-separated values.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="The table in Markdown.")]
Explain = Annotated[bool, typer.Option("--explain", help="Each term with its formula, numbers and source.")]
JSON_MOMENTS = 100  # of the step's thousands
Output = Annotated[str | None, typer.Option("-o", "--output", help="Write the plan (TOML) to this file.", show_default=False)]


@takes_run
def plan(
    request: Request,
    output: Output = None,
    objective: Annotated[str, typer.Option("--objective", help="time, cost or memory.")] = "time",
    max_cost: Annotated[str | None, typer.Option("--max-cost", help="Dollars for the whole run.", show_default=False)] = None,
    deadline: Annotated[str | None, typer.Option("--deadline", help="30d, 12h.", show_default=False)] = None,
    max_gpus: Annotated[int | None, typer.Option("--max-gpus", help="Use at most so many.", show_default=False)] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Plans to show.")] = 10,
    explain: Explain = False,
    json_: Json = False,
    csv_: Csv = False,
    markdown: Markdown = False,
) -> int:
    """Search every layout that the options leave open and rank what fits.

    Exit status 1 where nothing fits; then the cheapest change that would is named.

    Example: trainwright plan llama-3.1-8b --on 8xH100 --seq-len 8192
    """
    from ..api import plan as search
    from ..units import parse_count, parse_seconds
    from .output import check_target, console, print_json, print_rows, table_format

    form = table_format(json_, csv_, markdown)
    check_target(output)
    with _waiting("searching layouts"):
        plans = search(
            request.document,
            top=top,
            objective=objective,
            max_cost=parse_count(max_cost.lstrip("$"), "--max-cost", "an amount of dollars such as 50000 or 1.2M") if max_cost else None,
            deadline_s=parse_seconds(deadline, "--deadline") if deadline else None,
            max_gpus=max_gpus,
            catalog_files=request.catalog_files,
            profile=request.profile,
        )
    if form == "json":
        print_json(plans.to_dict())
    elif form != "table":
        from ..report.rows import plan_row

        print_rows([plan_row(e) for e in plans], form)
    else:
        from ..report.text import plans_text

        plans_text(console(), plans, explain=explain)
    if output and len(plans):
        _write_plan(output, plans, quiet=form != "table")
    return 0 if len(plans) else 1


@takes_run
def estimate(request: Request, explain: Explain = False, json_: Json = False) -> int:
    """Answer one fully specified run: memory, step time, traffic, throughput, cost.

    What is left open takes the documented default. Exit status 1 where it does not fit.

    Example: trainwright estimate llama-3.1-8b --on 8xH100 --micro-batch 1 --recompute full
    """
    from ..api import estimate as answer
    from .output import console, print_json

    found = answer(request.document, catalog_files=request.catalog_files, profile=request.profile)
    if json_:
        print_json(found.to_dict())
    else:
        from ..report.text import estimate_text

        estimate_text(console(), found, explain=explain)
    return 0 if found.fits else 1


@takes_run
def memory(request: Request, explain: Explain = False, json_: Json = False) -> int:
    """Memory alone: by part, through the step as a picture, and what each lever would change.

    Exit status 1 where it does not fit.

    Example: trainwright memory 7B --on 8xA100-80GB --zero 3
    """
    from ..api import estimate as answer
    from ..report.memory_timeline import condensed, draw
    from .output import console, print_json

    found = answer(request.document, catalog_files=request.catalog_files, profile=request.profile)
    moments = found.table.memory.timeline(found.index)
    if json_:
        from dataclasses import asdict

        document = found.to_dict()
        answered = {k: document[k] for k in ("spec", "fits", "gpus", "parameters", "memory", "warnings", "assumed")}
        print_json({**answered, "timeline": [asdict(m) for m in condensed(moments, JSON_MOMENTS)]})
    else:
        from ..report.text import levers_table, memory_text

        memory_text(console(), found, explain=explain)
        draw(console(), moments)
        console().print(levers_table(found))
    return 0 if found.fits else 1


def _write_plan(output: str, plans: Plans, quiet: bool) -> None:
    from ..report.toml import plan_toml
    from .output import console, wrote

    said = wrote(output, plan_toml(plans[0]))
    if not quiet:
        console().print(said)


def _waiting(what: str) -> Any:
    """A spinner on a terminal, nothing elsewhere."""
    from contextlib import nullcontext

    from .output import console

    screen = console(stderr=True)
    return screen.status(what) if screen.is_terminal else nullcontext()


def register(app: typer.Typer) -> None:
    for command in (plan, estimate, memory):
        app.command()(command)
