"""``trainwright explain "Tried to allocate 9.47 GiB"``: which tensor asked for it, and how full the card was of what."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    message: Annotated[
        str, typer.Argument(help="The out-of-memory line or its size (9.47 GiB); a log with such a line, - for stdin.", show_default=False)
    ],
    plan: Annotated[str, typer.Option("--plan", help="The run spec (TOML or JSON) that ran, - for stdin.", show_default=False)] = "",
    model: Annotated[str, typer.Option("--model", help="In place of a plan: the model,", show_default=False)] = "",
    on: Annotated[str, typer.Option("--on", help="and its GPUs.", show_default=False)] = "",
    top: Annotated[int, typer.Option("--top", min=1, max=50, help="Suspects to show.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> int:
    """Name the tensor that an out-of-memory message is about, by its size, and what would make it smaller.

    A whole message also tells whether freed blocks, other processes or another
    card are in the way, and how far the plan knew; that a process was killed
    (exit code -9), what the plan takes of a node's RAM.

    Exit status 1 where no tensor of the run has nearly that size.

    Example: trainwright explain "Tried to allocate 9.47 GiB" --model llama-3.1-8b --on 8xH100
    """
    from dataclasses import asdict
    from os.path import isfile

    from ..api import estimate, load, parse_document
    from ..cost.complaint import conclusions, first_complaint, read_complaint
    from ..cost.oom import explain_allocation
    from ..errors import SpecError
    from ..resolve import resolve
    from ..units import format_bytes
    from .output import console, print_json, print_rows, read_text

    if bool(plan) == bool(model):
        raise SpecError("a run is needed: --plan run.toml, or --model and --on", "explain")
    if model and not on:
        raise SpecError("which GPUs? none are named", "--on", ["--on 8xH100"])
    if message == "-" == plan:
        raise SpecError("is read from stdin already", "--plan", ["--plan run.toml"])
    if message == "-" or isfile(message):
        message = read_text(message)
    message = first_complaint(message)
    run = resolve(load(parse_document(read_text(plan), "stdin" if plan == "-" else plan) if plan else {"model": model, "cluster": on}))
    complaint = read_complaint(message)
    sized = complaint.request is not None
    suspects = explain_allocation(message, run.model, run.cluster, run.job, run.plan, top) if sized else []
    said = list(conclusions(complaint, estimate(run.spec).memory_dict(), run.cluster.host_memory_bytes))
    if json_:
        print_json({"message": asdict(complaint), "conclusions": said, "suspects": [asdict(s) for s in suspects]})
    else:
        for line in said:
            console().print(line, markup=False)
        rows = [
            {
                "tensor": s.what,
                "size": format_bytes(s.bytes),
                "off by": f"{s.error:+.1%}",
                "formula": s.formula,
                "when": s.when,
                "smaller by": s.advice,
            }
            for s in suspects
        ]
        if rows:
            print_rows(rows, "table")
    return 0 if complaint.host or any(abs(s.error) < 0.02 for s in suspects) else 1


def register(app: typer.Typer) -> None:
    app.command()(explain)
