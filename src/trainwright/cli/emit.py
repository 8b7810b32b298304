"""``trainwright emit PLAN --to TARGET -o DIR``: the files that an engine, a launcher or a scheduler reads."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpecError
from .options import Request, takes_run


@takes_run
def emit(
    request: Request,
    to: Annotated[
        str, typer.Option("--to", help="torchtitan, megatron, deepspeed, fsdp, accelerate, trainer, torchrun, slurm, kubernetes, skypilot.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder to write into; it is made where there is none.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    name: Annotated[str, typer.Option("--name", help="Name of the job.")] = "trainwright",
    script: Annotated[str, typer.Option("--script", help="Your own program, for targets that configure one.")] = "train.py",
    checkpoints: Annotated[str, typer.Option("--checkpoints", help="Where the run saves.")] = "outputs",
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0, max=1e3, help="A plan holds none.")] = 3e-4,
    image: Annotated[str, typer.Option("--image", help="Container of a Kubernetes job.")] = "",
    nvme_path: Annotated[str, typer.Option("--nvme-path", help="Local disk for offload to NVMe.")] = "/local_nvme",
    minutes: Annotated[int, typer.Option("--minutes", min=1, max=10**6, help="Time limit of a batch job.")] = 2880,
    torchtitan_version: Annotated[str, typer.Option("--torchtitan-version", help="Before 0.3 a TOML is written.")] = "0.3.0",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout: the files.")] = False,
) -> int:
    """Write the files that run a plan: configuration, launch script, README.

    What the target cannot express is an error that names the field and the nearest plan that it can. No existing file is replaced without
    --force, and nothing is left half written.

    Example: trainwright emit llama-3.1-8b --on 16xH100 --recompute full --to slurm -o job
    """
    from ..api import emit as written
    from ..emit import Options
    from ..emit.readme import OPEN
    from .output import console, print_json, require_name

    require_name(output, "folder")
    options = Options()
    options = replace(
        options,
        name=name,
        script=script,
        output=checkpoints,
        learning_rate=learning_rate,
        nvme_path=nvme_path,
        minutes=minutes,
        torchtitan_version=torchtitan_version,
        image=image or options.image,
    )
    files = written(request.document, to, options, catalog_files=request.catalog_files)
    paths = write_all(Path(output), files, force)
    for line in (row for row in files["README.md"].splitlines() if row.startswith(OPEN)):
        print(line, file=sys.stderr)
    if json_:
        print_json({"target": to, "folder": str(output), "files": [str(p) for p in paths]})
    else:
        screen = console()
        for path in paths:
            screen.print(f"wrote {path}", markup=False)
        for line in files["README.md"].splitlines()[:3]:
            screen.print(line, markup=False)
    return 0


def write_all(folder: Path, files: Mapping[str, str], force: bool) -> list[Path]:
    """All of the files or none: written into a temporary folder beside the target, then moved."""
    if folder.exists() and not folder.is_dir():
        raise SpecError("is a file, a folder is needed", str(folder))
    taken = [n for n in sorted(files) if (folder / n).exists() or (folder / n).is_symlink()]
    if taken and not force:
        raise SpecError(
            f"holds {', '.join(taken[:4])}{' ...' if len(taken) > 4 else ''} already", str(folder), ["--force", "another folder"]
        )
    if any((folder / n).is_dir() for n in taken):
        raise SpecError("holds a folder of that name", str(folder / next(n for n in taken if (folder / n).is_dir())))
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        for name, text in files.items():
            path = temporary / name
            path.write_text(text, encoding="utf-8", newline="\n")
            path.chmod((0o777 if text.startswith("#!") else 0o666) & ~_umask())
        folder.mkdir(exist_ok=True)
        for name in files:
            os.replace(temporary / name, folder / name)
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror}", str(folder)) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return [folder / n for n in files]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def register(app: typer.Typer) -> None:
    app.command()(emit)
