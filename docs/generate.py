"""Writes docs/commands.md from the commands' own help and docs/checks.md from the registry of checks. `--check` writes nothing and exits 1 where a page is
stale."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "commands.md"
CHECKS_PAGE = Path(__file__).parent / "checks.md"


def commands() -> dict[str, Any]:
    """Every command by its full name, groups opened."""
    import typer

    from trainwright.cli import build

    found: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        inner = getattr(command, "commands", None)
        if inner:
            for name, child in inner.items():
                walk(child, f"{path} {name}")
        else:
            found[path] = command

    walk(typer.main.get_command(build()), "trainwright")
    return dict(sorted(found.items()))


def help_of(path: str, command: Any) -> str:
    import typer

    context = typer.Context(command, info_name=path, terminal_width=100, max_content_width=100)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def page() -> str:
    parts = ["# Commands\n", "Made from the commands' own help by `make docs`; a test fails when it is stale.\n"]
    for path, command in commands().items():
        parts += [f"## {path}\n", f"```text\n{help_of(path, command)}\n```\n"]
    return "\n".join(parts)


def checks_page() -> str:
    """Every check of `trainwright check`: what it looks for, how bad it is, what is right all the same, and a file that shows it."""
    from trainwright.check.checks import CHECKS

    parts = ["# Checks\n", "What `trainwright check` looks for. Made from the registry by `make docs`; a test fails when it is stale.\n"]
    parts += [
        "| check | what | severity |\n|---|---|---|\n"
        + "".join(f"| {c.name} | {c.title} | {c.severity} |\n" for _, c in sorted(CHECKS.items()))
    ]
    for _, check in sorted(CHECKS.items()):
        parts.append(f"## {check.name}: {check.title}\n")
        if check.right:
            parts.append(f"Right all the same: {check.right}.\n")
        example = check.example
        said = [f"`{k}`: `{v}`" for k, v in (("--launch", example.launch), ("--model", example.model), ("--on", example.on)) if v]
        parts += [f"`{name}`\n\n```text\n{text.rstrip()}\n```\n" for name, text in example.files.items()]
        parts += ["with " + ", ".join(said) + "\n"] if said else []
        parts.append("".join(f"* {f.place}: {f.what}" + (f" *{f.mend}*" if f.mend else "") + "\n" for f in found(check)))
    return "\n".join(parts)


def found(check: Any) -> list[Any]:
    """What the check itself says of its example."""
    from trainwright.check.read import read_setup

    example = check.example
    asked = {k: v for k, v in (("model", example.model), ("on", example.on)) if v}
    return list(check.run(read_setup(dict(example.files), example.launch, asked)))


if __name__ == "__main__":
    os.environ.update(TERM="dumb", COLUMNS="100", NO_COLOR="1")
    pages = {PAGE: page(), CHECKS_PAGE: checks_page()}
    stale = [p.name for p, text in pages.items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"docs/{', docs/'.join(stale)} is stale: run `make docs`" if stale else 0)
    for path, text in pages.items():
        path.write_text(text)
