"""``trainwright calibrate``: a profile of this machine by measuring it, or of a cluster from its own runs."""

from __future__ import annotations

from typing import Annotated

import typer


def calibrate(
    runs: Annotated[str, typer.Argument(help="CSV or JSONL of runs: the run spec's keys, measured.step_s.", show_default=False)] = "",
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the profile (TOML) here.", show_default=False)] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Without runs: ranks at work (all GPUs, one a core).", show_default=False)
    ] = None,
    dtypes: Annotated[str, typer.Option("--dtypes", help="Without runs: number formats to measure.")] = "fp32,bf16",
    thorough: Annotated[bool, typer.Option("--thorough", help="Without runs: measure some minutes instead of one.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print an example CSV and stop.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a profile for --profile: of this machine, measured with PyTorch, or of a cluster, from a CSV of its runs.

    Without RUNS this machine's matrix products, attention, memory-bound kernels, optimizer and collectives are timed, about a minute on a CPU, and the
    profile describes its device, a CPU's too: --on 2xthis-cpu. With RUNS one factor a GPU and framework says how far step times were from the
    predicted ones. Needs the extra where it measures: pip install 'trainwright[train]'

    Example: trainwright calibrate --template
    """
    from dataclasses import asdict

    from ..api import estimate_many
    from ..measure.calibrate import calibrate as fit
    from ..measure.compare import Comparison
    from ..measure.record import read_records
    from .output import check_target, console, print_json, print_rows, wrote

    if template:
        typer.echo(TEMPLATE, nl=False)
        return
    check_target(output, "machine.toml")
    if not runs:
        _measure(ranks, _formats(dtypes), thorough, output, json_)
        return
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
        said = wrote(output, profile.to_toml())
        if not json_:
            console().print(f"{said}; use it with --profile {output}")


def _formats(text: str) -> list[str]:
    from ..errors import unknown

    found = [t.strip() for t in text.split(",") if t.strip()]
    for name in found:
        if name not in ("fp32", "bf16", "fp16"):
            raise unknown("number format", name, ("fp32", "bf16", "fp16"), "--dtypes")
    return found or ["fp32"]


def _measure(ranks: int | None, dtypes: list[str], thorough: bool, output: str | None, json_: bool) -> None:
    from ..train.verify import measure_machine
    from .output import console, print_json, print_rows, wrote
    from .plan import _waiting

    with _waiting("measuring this machine"):
        machine = measure_machine(ranks, dtypes, thorough)
    if json_:
        print_json({"gpu": dict(machine.gpu), "fits": [dict(vars(f)) for f in machine.fits], "seconds": machine.seconds})
    else:
        print_rows(machine.rows(), "table")
        console().print(f"{machine.gpu['source']}; {machine.seconds:.0f} s. Other numbers stay the catalogue's and the frameworks'.")
    if output:
        said = wrote(output, machine.to_toml())
        if not json_:
            console().print(f"{said}; use it with --profile {output} --on {machine.raw['device']['ranks']}x{machine.id}")


TEMPLATE = """\
id,model,cluster.gpu,cluster.nodes,cluster.gpus_per_node,training.seq_len,training.global_batch_size,strategy.framework,strategy.tp,strategy.micro_batch_size,strategy.recompute,measured.step_s
run-1,llama-3.1-8b,h100,1,8,8192,64,fsdp2,1,1,full,11.2
run-2,llama-3.1-8b,h100,2,8,8192,128,fsdp2,1,1,selective,9.9
"""


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
