"""``trainwright verify``: predicted against measured."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Request, takes_run
from .plan import Json, _waiting


@takes_run
def verify(
    request: Request,
    memory: Annotated[bool, typer.Option("--memory", help="Bytes and messages of one rank, by PyTorch on fake tensors.")] = False,
    tolerance: Annotated[
        int | None, typer.Option("--tolerance", min=0, help="Bytes that a row may be off (8192).", show_default=False)
    ] = None,
    json_: Json = False,
) -> int:
    """Hold the estimate against PyTorch itself: memory and messages of one rank of the plan's true size. Needs no GPU.

    PyTorch's own DDP, ZeRO-1, FSDP2, HSDP, tensor and pipeline parallelism run two steps on fake tensors and a fake process group. What is left
    open takes the documented default. Exit status 1 where a row is outside the tolerance. Needs the extra: pip install 'trainwright[train]'

    Example: trainwright verify 10M --on 8xH100 --seq-len 256 --global-batch 8 --memory
    """
    from ..api import verify as hold
    from ..errors import SpecError
    from .output import print_json

    if not memory:
        raise SpecError("verify what? memory and messages are all that can be so far", "verify", ["--memory"])
    with _waiting("running PyTorch on fake tensors"):
        found = hold(request.document, tolerance_bytes=tolerance, catalog_files=request.catalog_files)
    if json_:
        print_json(found.to_dict())
    else:
        from ..report.verify_text import verification_text
        from .output import console

        verification_text(console(), found)
    return 0 if found.exact else 1


def register(app: typer.Typer) -> None:
    app.command()(verify)
