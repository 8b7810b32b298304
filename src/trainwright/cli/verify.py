"""``trainwright verify``: predicted against measured."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Request, takes_run
from .plan import Json, _waiting


@takes_run
def verify(
    request: Request,
    memory: Annotated[
        bool, typer.Option("--memory", help="Bytes and messages of one rank, by PyTorch on fake tensors; nothing is run.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Run it: losses, gradients, collectives.")] = False,
    times: Annotated[bool, typer.Option("--time", help="Run it: seconds of a step, predicted and measured.")] = False,
    layouts: Annotated[bool, typer.Option("--layouts", help="With --time: more layouts of the same job, side by side.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="With --time: turns of every layout; the best counts.")] = 6,
    tolerance: Annotated[
        int | None, typer.Option("--tolerance", min=0, help="With --memory: bytes that a row may be off (8192).", show_default=False)
    ] = None,
    json_: Json = False,
) -> int:
    """Hold the estimate against PyTorch itself, on this machine. Exit status 1 where a row is outside its tolerance.

    --memory: PyTorch's own DDP, ZeRO-1, FSDP2, HSDP, tensor and pipeline parallelism run two steps on fake tensors and a fake process group of the
    plan's true size, without a GPU. --exact: the plan runs for real, one process a rank; losses and gradients in fp32 against one device, bytes and
    calls of every collective against the plan's. --time: step times against those predicted for this machine, which --profile describes
    (trainwright calibrate) or which is measured first; on GPUs memory and MFU too. None of the three: --exact and --time.
    Needs the extra: pip install 'trainwright[train]'

    Example: trainwright verify 10M --on 8xH100 --seq-len 256 --global-batch 8 --memory
    """
    from .output import print_json

    if memory and (exact or times):
        from ..errors import SpecError

        raise SpecError("fake tensors or a real run, one at a time", "--memory", ["--exact", "--time"])
    if not memory:
        return _real(request, exact or not times, times or not exact, layouts, rounds, json_)
    from ..api import verify as hold

    with _waiting("running PyTorch on fake tensors"):
        found = hold(request.document, tolerance_bytes=tolerance, catalog_files=request.catalog_files)
    if json_:
        print_json(found.to_dict())
    else:
        from ..report.verify_text import verification_text
        from .output import console

        verification_text(console(), found)
    return 0 if found.exact else 1


def _real(request: Request, exact: bool, times: bool, layouts: bool, rounds: int, json_: bool) -> int:
    from ..api import verify_real
    from .output import console, print_json

    files = tuple(f for f in request.catalog_files if f != request.profile_file)
    with _waiting("running the plan on this machine"):
        found = verify_real(
            request.document,
            profile=request.profile_file,
            catalog_files=files,
            exact=exact,
            times=times,
            every_layout=layouts,
            rounds=rounds,
        )
    if json_:
        print_json(found.to_dict())
    else:
        from ..report.verify_text import real_text

        real_text(console(), found)
    return 0 if found.within else 1


def register(app: typer.Typer) -> None:
    app.command()(verify)
