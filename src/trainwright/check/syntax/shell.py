"""A shell script as documents: its scheduler header, every command that starts training, every JSON or YAML that it writes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from ..document import Document, Path, Problem
from . import json, launch, yaml
from .shell_run import Script, Written, follow
from .source import Broken, Lines

SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "p": "partition", "J": "job-name", "t": "time", "o": "output", "e": "error",
    "w": "nodelist", "x": "exclude", "A": "account", "q": "qos", "C": "constraint", "D": "chdir", "d": "dependency", "a": "array",
    "L": "licenses", "m": "distribution",
}  # fmt: skip


def read(name: str, text: str, others: Callable[[str], str | None] = lambda name: None) -> list[Document]:
    """The script itself first (its data: the ``#SBATCH`` header), then its parts in the order of their lines."""
    header, lines, problems = directives(text)
    script = follow(text, Lines(text).at, others, _granted(header))
    problems = [*problems, *_dropped(script), *script.problems]
    data = {"sbatch": header} if header else {}
    whole = Document(name, text, "shell", data, lines, tuple(dict.fromkeys(problems)), detail=script)
    return [whole, *parts(name, text, script)]


def _granted(header: dict[str, Any]) -> dict[str, str]:
    """What Slurm sets for a job with this header."""
    found: dict[str, str] = {}
    for option, names in GRANTED.items():
        value = str(header.get(option, ""))
        if re.fullmatch(r"\d{1,6}", value):
            found |= dict.fromkeys(names, value)
    gpus = re.search(r"(?:gpu:)?(?:[\w.-]+:)?(\d{1,4})$", str(header.get("gpus-per-node") or header.get("gres") or ""))
    if gpus:
        found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus.group(1))
    return found


GRANTED = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}


def inside(name: str, text: str, source: str, first_line: int, given: dict[str, str]) -> list[Document]:
    """A script that stands inside a file of another syntax, from its line on: only its parts."""
    script = follow(source, Lines(source, first_line).at, given=given)
    found = parts(name, text, script)
    broken = tuple(p for p in script.problems if p.kind in ("broken", "unclosed", "arithmetic"))
    return [*found, Document(name, text, "shell", {}, {}, broken, parent=name, part="script", detail=script)] if broken else found


def parts(name: str, text: str, script: Script) -> list[Document]:
    """The files that a script writes and the layers of the commands that it starts."""
    found: list[Document] = [d for written in script.written for d in embedded(name, text, written)]
    seen: set[str] = set()
    for command in script.commands:
        for layer in launch.layers(command):
            made = launch.document(name, text, layer, command.label)
            key = repr((layer.kind, made.data, layer.line))
            if key not in seen:
                seen.add(key)
                found.append(made)
    return found


def _dropped(script: Script) -> list[Problem]:
    return [Problem("sourced", f"reads {name[:80]}, which was not given", line) for name, line in dict.fromkeys(script.sourced)]


def directives(text: str) -> tuple[dict[str, Any], dict[Path, int], list[Problem]]:
    """``#SBATCH`` lines by Slurm's rules: up to the first command, ``##SBATCH`` is off, a comment may follow, the last of a key wins."""
    found: dict[str, Any] = {}
    lines: dict[Path, int] = {}
    problems: list[Problem] = []
    ended = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("#"):
            ended = ended or (number if line.strip() else 0)
            continue
        if not re.match(r"#SBATCH\s", line):
            continue
        if ended:
            problems.append(
                Problem(
                    "late-directive", f"Slurm reads directives up to the first command (line {ended}): {line[:50]!r} has no effect", number
                )
            )
            continue
        for key, value in _words(line[len("#SBATCH") :]):
            if ("sbatch", key) in lines:
                problems.append(
                    Problem(
                        "duplicate-key",
                        f"--{key} is given twice (first on line {lines['sbatch', key]}); the last wins",
                        number,
                        path=("sbatch", key),
                    )
                )
            found[key], lines["sbatch", key] = value, number
    return found, lines, problems


def _words(text: str) -> list[tuple[str, Any]]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split("#")[0].split()
    found: list[tuple[str, Any]] = []
    for i, word in enumerate(words):
        long = re.match(r"--([A-Za-z][\w-]*)(?:=(.*))?$", word)
        short = re.match(r"-([A-Za-z])=?(.*)$", word)
        after = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else True
        if long:
            found.append((long.group(1), long.group(2) if long.group(2) is not None else after))
        elif short:
            found.append((SHORT.get(short.group(1), short.group(1)), short.group(2) or after))
    return found


def embedded(name: str, text: str, written: Written) -> list[Document]:
    """A here-document that is JSON or YAML, with its lines in the script."""
    body = str(written.text)
    line_of = written.text.line_of()

    class Where(Lines):
        def __init__(self) -> None:
            super().__init__("")

        def at(self, offset: int) -> int:
            return line_of(offset)

    target = written.target.rpartition("/")[2] or "here-document"
    about: dict[str, Any] = {"parent": name, "part": target}
    looks_json = body.lstrip().startswith("{") or target.endswith(".json")
    try:
        if looks_json:
            return [_renamed(json.read(name, body, Where(), **about), text)]
        if target.endswith((".yaml", ".yml")) or re.match(r"\s*(#.*\n\s*)*[A-Za-z_][\w.-]*:(\s|$)", body):
            return [_renamed(d, text) for d in yaml.read(name, body, written.line, **about)]
    except Broken as error:
        if looks_json or target.endswith((".yaml", ".yml")):
            problem = Problem(error.kind, f"the {target} that the script writes: {error.message}", error.line, fatal=True)
            return [Document(name, text, "json" if looks_json else "yaml", None, {}, (problem,), **about)]
    return []


def _renamed(document: Document, text: str) -> Document:
    return Document(document.name, text, document.syntax, document.data, document.lines, document.problems, document.parent, document.part)
