"""Writes docs/commands.md from the commands' own help. `--check` writes nothing and exits 1 where the page is stale."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "commands.md"


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


if __name__ == "__main__":
    os.environ.update(TERM="dumb", COLUMNS="100", NO_COLOR="1")
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == text else "docs/commands.md is stale: run `make docs`")
    PAGE.write_text(text)
