"""``trainwright convert CONFIG... --to TARGET -o DIR``: the files of one engine as those of another, and what is not the same there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import one_line

if TYPE_CHECKING:
    from ..check.convert import Conversion

KEYS_SHOWN = 20


def convert(
    to: Annotated[
        str, typer.Option("--to", help="torchtitan, megatron, deepspeed, fsdp, accelerate, trainer, torchrun, slurm, kubernetes, skypilot.")
    ],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG...", help="Files of one run, - for stdin.", show_default=False)
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Folder to write into; without it nothing is written.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option("--model", help="The model, where no file names it.", show_default=False)] = "",
    on: Annotated[str, typer.Option("--on", help="GPUs and their kind: 16xH100.", show_default=False)] = "",
    launch: Annotated[
        str, typer.Option("--launch", help="The command that starts the run; it overrides the files.", show_default=False)
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Write the files of one engine, launcher or scheduler as those of another, and say everything that is not the same there.

    The table names each field that changed, was lost or assumed (types of weights, gradients and masters, accumulation, clipping, learning rate, loss
    scale, ...), and every key that was not carried over. Without -o only the table is shown. Nothing is run.

    Example: trainwright convert --launch "torchrun --nproc-per-node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1
    --gradient_accumulation_steps 4 --bf16 True --learning_rate 1e-5 --output_dir out" --to deepspeed -o converted
    """
    from ..check.convert import convert as converted
    from .emit import write_all
    from .output import print_json, read_bytes, require_name

    require_name(output, "folder")
    texts = {("stdin" if name == "-" else name): read_bytes(name) for name in files or ()}
    found = converted(texts, to, launch=launch, model=model or None, on=on or None)
    paths = write_all(Path(output), found.files, force) if output else []
    if json_:
        print_json({**found.to_dict(), "written": [str(p) for p in paths]})
    else:
        _show(found, paths)
    return 0


def _show(found: Conversion, paths: list[Path]) -> None:
    from ..check.convert import KINDS
    from .output import console, print_rows

    screen = console()
    for name, form in found.formats.items():
        screen.print(one_line(f"read {name}: {form}"), markup=False)
    rows = [r for r in found.differing if r.kind != "not carried"]
    print_rows(
        [{"field": _text(r.field), "": r.kind, "before": _text(r.before), "after": _text(r.after), "why": _why(r)} for r in rows],
        "table",
        f"What is not the same in {found.target}",
    )
    keys = [r for r in found.rows if r.kind == "not carried"]
    if keys:
        screen.print(f"\nNot carried over ({KINDS['not carried']}):")
        for r in keys[:KEYS_SHOWN]:
            said = f"{r.field} = {_text(r.before)}" if r.before is not None else r.why or r.field
            screen.print(f"  {_text(r.place)}  {one_line(said)}", markup=False)
        if len(keys) > KEYS_SHOWN:
            screen.print(f"  and {len(keys) - KEYS_SHOWN} more (--json names all)", markup=False)
    for path in paths:
        screen.print(one_line(f"wrote {path}"), markup=False)


def _why(row: Any) -> str:
    return one_line("; ".join(str(p) for p in (row.why, row.place) if p))


def _text(value: Any) -> str:
    return "-" if value is None else one_line(value, 80)


def register(app: typer.Typer) -> None:
    app.command()(convert)
