"""``trainwright check FILE...``: what is wrong with a configuration, before a GPU is rented."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SpecError, one_line, unknown

if TYPE_CHECKING:
    from ..check.fix import Mended
    from ..check.run import Report

READ = (".json", ".jsonc", ".json5", ".yaml", ".yml", ".toml", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".py")  # of a folder
MOST_FILES = 64


def check(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files or folders of one run, - for stdin.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A catalogue id, a config.json, a size such as 7B.", show_default=False)
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="GPUs and their kind: 64xH100, 8xA100-40GB.", show_default=False)] = None,
    launch: Annotated[
        str, typer.Option("--launch", help="The command that starts the run; it overrides the files.", show_default=False)
    ] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Write the mended file; comments and layout stay.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="With --fix and one file: write there.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file that -o names.")] = False,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="A check to leave out: K33.", show_default=False)] = None,
    form: Annotated[str, typer.Option("--format", help="text, github, sarif, json.")] = "text",
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    about: Annotated[str, typer.Option("--about", help="Show what a check looks for, with a faulty file: K05.", show_default=False)] = "",
) -> int:
    """Say what is wrong with the files of a run, most severe first, with the line and the smallest change that mends it.

    Reads DeepSpeed, Accelerate, Trainer, TRL, axolotl, LLaMA-Factory, Megatron, NeMo, torchtitan, GPT-NeoX, nanotron, Slurm, Kubernetes, SkyPilot
    files and more, by content; several files (or a folder's) and the launch line are judged together. Nothing is run. Exit status 1 where an error is found.

    Example: trainwright check --about K05
    """
    from ..api import check as checked
    from ..check.output import FORMS, render
    from .output import check_target, read_bytes

    form = "json" if json_ else form
    if form not in FORMS:
        raise unknown("format", form, FORMS, "--format")
    if about:
        return _about(about)
    if not files:
        raise SpecError("which files? none are named", "check", ["trainwright check ds_config.json"])
    files = [file for name in files for file in _files(name)]
    texts = {("stdin" if name == "-" else name): read_bytes(name) for name in files}
    if output is not None and not fix:
        raise SpecError("is for --fix", "--output")
    check_target(output, Path(files[0]).name)
    judge = lambda those: checked(those, launch=launch, model=model, on=on, ignore=ignore or ())  # noqa: E731
    report, mended = judge(texts), []
    if fix:
        mended = _fix(report, list(texts), output, force)
        now = texts | {m.name: m.text for m in mended}
        report = judge(dict(zip([output], now.values())) if output else now)  # as the files are now
    sys.stdout.write(render(report, form, mended))
    return 1 if report.has_errors else 0


def _files(name: str) -> list[str]:
    """The file itself, or what a folder holds of configurations and scripts."""
    folder = Path(name)
    if name == "-" or not folder.is_dir():
        return [name]
    found = sorted(str(p) for p in folder.iterdir() if p.suffix in READ and p.is_file())
    if not 1 <= len(found) <= MOST_FILES:
        held = f"{len(found)} files, more than {MOST_FILES}" if found else "no configuration file"
        raise SpecError(f"holds {held}", name, [f"trainwright check {folder / '...'}"])
    return found


def _fix(report: Report, names: list[str], output: str | None, force: bool) -> list[Mended]:
    """Writes every file that changes, and gives those back; what could not be changed is said on stderr."""
    from ..check.fix import mend
    from ..check.read import read_document
    from .output import write_text

    if output and len(names) > 1:
        raise SpecError("names one file, and several are checked", "--output")
    if output and Path(output).exists() and not force and Path(output).resolve() != Path(names[0]).resolve():
        raise SpecError("exists already", output, ["--force", "another name"])
    heads = {r.document.name: r.document for r in report.setup.readings if r.document.parent is None and r.document.name in names}
    every = [mend(document, report.findings, read_document) for document in heads.values()]
    changed = [m for m in every if output or m.text != heads[m.name].text]
    if not output and any(m.name == "stdin" for m in changed):
        raise SpecError("standard input has no file to mend", "--fix", ["-o FILE"])
    for m in every:
        for finding, reason in zip(m.left, m.reasons, strict=True):
            print(one_line(f"{finding.place}: {finding.check} is left: {reason}", 2000), file=sys.stderr)
    for m in changed:
        print(one_line(f"wrote {write_text(output or m.name, m.text, like=m.name)}: {len(m.applied)} mended"), file=sys.stderr)
    return changed


def _about(name: str) -> int:
    from ..api import check as checked
    from ..check.checks import CHECKS
    from ..check.output import render

    entry = CHECKS.get_or_raise(name, "--about")
    print(f"{entry.name}  {entry.title}\nSeverity: {entry.severity}." + (f"\nRight all the same: {entry.right}." if entry.right else ""))
    for file, text in entry.example.files.items():
        print(f"\n--- {file}\n{text.rstrip()}")
    extra = [f"--{k} {v!r}" for k, v in (("launch", entry.example.launch), ("model", entry.example.model), ("on", entry.example.on)) if v]
    print(f"\n$ trainwright check {' '.join([*entry.example.files, *extra])}")
    report = checked(entry.example.files, launch=entry.example.launch, model=entry.example.model or None, on=entry.example.on or None)
    print(render(report, "text"), end="")
    return 0


def register(app: typer.Typer) -> None:
    app.command()(check)
