"""``trainwright calibrate runs.csv``: a profile of a cluster from its own runs."""

from __future__ import annotations

from typing import Annotated

import typer


def calibrate(
    runs: Annotated[str, typer.Argument(help="CSV or JSONL of runs: the run spec's keys, measured.step_s.", show_default=False)] = "",
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the profile (TOML) here.", show_default=False)] = None,
    template: Annotated[bool, typer.Option("--template", help="Print an example CSV and stop.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Measure how far step times of your own runs are from the predicted ones, and keep the factor for --profile.

    Example: trainwright calibrate --template
    """
    from dataclasses import asdict

    from ..api import estimate_many
    from ..errors import SpecError
    from ..measure.calibrate import calibrate as fit
    from ..measure.compare import Comparison
    from ..measure.record import read_records
    from .output import console, print_json, print_rows, write_text

    if template:
        typer.echo(TEMPLATE, nl=False)
        return
    if not runs:
        raise SpecError("a file of runs is needed", "calibrate", ["trainwright calibrate --template > runs.csv"])
    records = read_records(runs)
    profile = fit([Comparison(r, e) for r, e in zip(records, estimate_many(r.spec for r in records), strict=True)])
    if json_:
        print_json([asdict(f) for f in profile.factors])
    else:
        rows = [
            {"GPU": f.gpu, "framework": f.framework, "runs": f.runs, "factor": round(f.factor, 4)}
            | {"mean error before": f"{f.before:.1%}", "after": f"{f.after:.1%}"}
            for f in profile.factors
        ]
        print_rows(rows, "table")
    if output:
        path = write_text(output, profile.to_toml())
        if not json_:
            console().print(f"wrote {path}; use it with --profile {path}")


TEMPLATE = """\
id,model,cluster.gpu,cluster.nodes,cluster.gpus_per_node,training.seq_len,training.global_batch_size,strategy.framework,strategy.tp,strategy.micro_batch_size,strategy.recompute,measured.step_s
run-1,llama-3.1-8b,h100,1,8,8192,64,fsdp2,1,1,full,11.2
run-2,llama-3.1-8b,h100,2,8,8192,128,fsdp2,1,1,selective,9.9
"""


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
