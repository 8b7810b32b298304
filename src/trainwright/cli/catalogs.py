"""``trainwright models | gpus | prices``: the catalogues."""

from __future__ import annotations

from typing import Annotated

import typer

Match = Annotated[str, typer.Argument(help="Only rows that contain this text.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Csv = Annotated[bool, typer.Option("--csv", help="Comma-separated values.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="A Markdown table.")]


def _show(rows: list[dict[str, object]], match: str, json_: bool, csv_: bool, markdown: bool) -> None:
    from ..errors import SpecError, nearest
    from .output import print_rows, table_format

    form = table_format(json_, csv_, markdown)
    found = [r for r in rows if match.lower() in " ".join(str(v) for v in r.values()).lower()]
    if match and not found:
        first = [str(next(iter(r.values()))) for r in rows]
        raise SpecError(f"nothing contains {match[:60]!r}", "catalogue", nearest(match, first))
    print_rows(found, form)


def models(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """The models that a plan can name.

    Example: trainwright models llama --markdown
    """
    from ..catalog.load import list_models

    _show(list_models(), match, json_, csv_, markdown)


def gpus(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """The GPUs: dense peaks, memory, bandwidths per GPU and per direction, power, price.

    Example: trainwright gpus H100 --json
    """
    from ..catalog.load import list_gpus

    _show(list_gpus(), match, json_, csv_, markdown)


def prices(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """Prices in dollars per GPU-hour, with provider, kind, date and source.

    Example: trainwright prices H100 --csv
    """
    from ..catalog.load import list_prices

    _show(list_prices(), match, json_, csv_, markdown)


def register(app: typer.Typer) -> None:
    for command in (models, gpus, prices):
        app.command()(command)
