"""``trainwright export``: a checkpoint as a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .plan import Json


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or the folder of a run (its newest).", show_default=False)],
    output: Annotated[str, typer.Option("-o", "--output", help="The folder to write.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; left out: as the weights are kept.", show_default=False)
    ] = None,
    json_: Json = False,
) -> int:
    """Write a checkpoint's weights and config.json in Hugging Face's layout, whatever layout it was trained in.

    Needs the extra: pip install 'trainwright[train]'

    Example: trainwright train --steps 1 -o runs/tiny

    Example: trainwright export runs/tiny -o tiny-llama --dtype bf16
    """
    from ..train.scope import require_torch

    require_torch()
    from ..train.export import export as write
    from ..units import format_bytes
    from .output import console, print_json, require_name

    require_name(output, "folder")
    found = write(Path(checkpoint), Path(output), dtype)
    if json_:
        print_json(vars(found))
    else:
        console(stderr=True).print(
            f"{found.folder}: {found.parameters:,} parameters, {format_bytes(found.bytes)}, of step {found.step}", soft_wrap=True
        )
    return 0


def register(app: typer.Typer) -> None:
    app.command()(export)
