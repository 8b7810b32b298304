"""Texts as documents: one reader a syntax. `read` tells them apart by name and content, and never raises on what a file holds."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..document import Document, Problem, Syntax
from . import json, shell, toml, yaml
from .source import Broken, decoded

Others = Callable[[str], str | None]
LAUNCH_WORDS = re.compile(
    r"(^|[\s;&|/])(torchrun|deepspeed|accelerate launch|srun|python3? |llamafactory-cli|axolotl |tune run)", re.MULTILINE
)


def read(name: str, raw: bytes | str, others: Others = lambda name: None) -> list[Document]:
    """The file and its parts (documents of a YAML stream, commands and here-documents of a script)."""
    text, problems = decoded(raw)
    kind = guess(name, text)
    if any(p.fatal for p in problems):
        return [Document(name, "", kind, None, {}, tuple(problems))]
    if not text.strip():
        return [Document(name, text, kind, None, {}, (Problem("broken", "is empty", 1, fatal=True),))]
    found = _read(name, text, kind, others)
    head = found[0]
    return [_with(head, (*problems, *head.problems)), *found[1:]]


def guess(name: str, text: str) -> Syntax:
    """By the first lines where they are plain, by the ending otherwise."""
    ending = name.lower().rpartition(".")[2] if "." in name else ""
    head = text.lstrip()[:4000]
    if ending in ("md", "markdown", "rst"):
        return "text"  # prose about commands is no script
    if head.startswith("#!") and not re.match(r"#!.*python", head):
        return "shell"
    by_ending: dict[str, Syntax] = {
        "json": "json", "jsonc": "json", "json5": "json", "yaml": "yaml", "yml": "yaml", "toml": "toml",
        "sh": "shell", "bash": "shell", "slurm": "shell", "sbatch": "shell", "sub": "shell", "job": "shell", "py": "text", "txt": "text",
    }  # fmt: skip
    if ending in by_ending and by_ending[ending] != "text":
        return by_ending[ending]
    if re.search(r"^#SBATCH\s", text, re.MULTILINE):
        return "shell"
    if head.startswith("{"):
        return "json"
    if ending == "py":
        return "text"
    if re.match(r"(\s*#.*\n)*\s*\[[\w.\"-]+\]\s*\n", text):
        return "toml"
    if re.match(r"(\s*(#.*|---|)\n)*\s*[\w.\"'/-]+:(\s|$)", text):
        return "yaml"
    return "shell" if LAUNCH_WORDS.search(text) else "text"


def _read(name: str, text: str, kind: Syntax, others: Others) -> list[Document]:
    try:
        if kind == "json":
            return [json.read(name, text)]
        if kind == "toml":
            return [toml.read(name, text)]
        if kind == "yaml":
            return _yaml(name, text)
        if kind == "shell":
            return shell.read(name, text, others)
    except (Broken, RecursionError) as error:
        broken = error if isinstance(error, Broken) else Broken("is nested too deeply")
        return _second(name, text, kind, broken)
    return [Document(name, text, "text", None, {}, ())]


def _second(name: str, text: str, kind: Syntax, error: Broken) -> list[Document]:
    """What its own reader refuses, read in another way where that works; the refusal stays a problem."""
    if kind == "json" and error.kind == "broken" and not text.lstrip().startswith(("{", "[")):
        other = guess("", text)
        if other not in ("json", "text"):
            return _read(name, text, other, lambda _: None)
    rendered = None
    if kind in ("json", "toml") and re.search(r"\{\{.*?\}\}|\{%.*?%\}", text):
        rendered = Problem("template", "a template: what it says is decided when it is rendered", error.line, fatal=True)
    return [Document(name, text, kind, None, {}, (rendered or error.problem(),))]


def _yaml(name: str, text: str) -> list[Document]:
    try:
        found = yaml.read(name, text)
        if "{{" in text and any(str(p[-1]).startswith("{'") for d in found for p in d.lines if p):
            raise Broken("{{ ... }} is no value")  # a template that happens to parse, as a table whose key is a table
        return found or [Document(name, text, "yaml", None, {}, (Problem("broken", "holds nothing", 1, fatal=True),))]
    except Broken as error:
        return _yaml_again(name, text, error)


def _yaml_again(name: str, text: str, error: Broken) -> list[Document]:
    """A Go or jinja template, JSON in a .yml, tabs: in this order."""
    if error.kind in ("anchors", "too-large"):
        raise error
    template = re.search(r"\{\{-?.*?\}\}|\{%-?.*?%\}", text)
    if template:
        line = text.count("\n", 0, template.start()) + 1
        problem = Problem("template", "a template (Helm, Go or jinja): what it says is decided when it is rendered", line)
        try:
            return [_with(d, (problem, *d.problems)) for d in yaml.read(name, _without_template(text))] or _fatal(name, text, problem)
        except Broken:
            return _fatal(name, text, problem)
    if text.lstrip().startswith(("{", "#")):
        try:
            found = json.read(name, text)
            return [found] if found.data else _fatal(name, text, error.problem())
        except Broken:
            pass
    if "\t" in text:
        try:
            again = yaml.read(name, text.replace("\t", "  "))
            problem = Problem("tab", f"a tab where YAML wants spaces: {error.message}", error.line)
            return [_with(d, (problem, *d.problems)) for d in again]
        except Broken:
            pass
    raise error


def _fatal(name: str, text: str, problem: Problem) -> list[Document]:
    return [Document(name, text, "yaml", None, {}, (Problem(problem.kind, problem.message, problem.line, fatal=True),))]


def _without_template(text: str) -> str:
    """Lines that are nothing but template go; a template inside a line becomes a word. The number of lines stays."""
    lines = []
    for line in text.split("\n"):
        bare = re.sub(r"\{\{-?.*?-?\}\}|\{%-?.*?-?%\}", "", line)
        if bare != line and not bare.strip(" \t-\"'"):
            lines.append("")
        else:
            lines.append(re.sub(r"\"?\{\{-?\s*(.*?)\s*-?\}\}\"?", "__template__", line))
    return "\n".join(lines)


def _with(document: Document, problems: tuple[Problem, ...]) -> Document:
    d = document
    return Document(d.name, d.text, d.syntax, d.data, d.lines, problems, d.parent, d.part, d.detail)
