"""``trainwright mcp``: the planner for assistants."""

from __future__ import annotations

from typing import Annotated

import typer


def mcp(
    listed: Annotated[bool, typer.Option("--list", help="Print the tools and stop.")] = False,
    limit: Annotated[float, typer.Option("--time-limit", help="Seconds that one call may take.", min=0.1, max=86400)] = 120,
) -> int:
    """Serve plan, estimate, memory, check and explain to an assistant (Model Context Protocol, standard input and output).

    Register it with your assistant as the command `trainwright mcp`. It opens no file: an assistant gives the text of
    what it asks about. Needs the extra: pip install 'trainwright[mcp]'.

    Example: trainwright mcp --list
    """
    from ..mcp import TOOLS, main

    if listed:
        for tool in TOOLS:
            typer.echo(f"{tool.__name__:10} {(tool.__doc__ or '').splitlines()[0]}")
    else:
        main(limit)
    return 0


def register(app: typer.Typer) -> None:
    app.command()(mcp)
