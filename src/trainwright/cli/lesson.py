"""``trainwright lesson``: every demonstration, table and exercise of the lesson, in its order."""

from __future__ import annotations

from typing import Annotated

import typer

from .simulate import finite, show


def lesson(
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    only: Annotated[str, typer.Option("--only", help="Parts whose name holds this: pipeline, exercise 4, ...", show_default=False)] = "",
) -> int:
    """Perform the lesson on distributed training: its numbers beside the right ones, a line wherever it errs, and its five exercises.

    Example: trainwright lesson --only "exercise 4"
    """
    from ..api import estimate
    from ..errors import unknown
    from ..lesson import parts
    from .output import print_json

    chosen = {name: perform for name, perform in parts(estimate).items() if only.lower() in name}
    if not chosen:
        raise unknown("part of the lesson", only, parts(), "--only")
    done = []
    for perform in chosen.values():
        report = perform()
        done.append(finite(report.to_dict()))
        if not json_:
            show(report, json_=False)
    if json_:
        print_json(done)
    return 0


def register(app: typer.Typer) -> None:
    app.command("lesson")(lesson)
