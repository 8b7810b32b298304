"""``trainwright models | gpus | prices``: the catalogues."""

from __future__ import annotations

from typing import Annotated

import typer

Match = Annotated[str, typer.Argument(help="Only rows that contain this text.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Csv = Annotated[bool, typer.Option("--csv", help="Comma-separated values.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="A Markdown table.")]

# What a terminal shows, with its headings; the other forms hold every column, sources included.
MODEL_COLUMNS = {
    "id": "model", "family": "family", "parameters": "parameters", "active_parameters": "active", "layers": "layers", "hidden": "hidden",
    "heads": "heads", "kv_heads": "KV", "vocab": "vocabulary", "experts": "experts", "experts_per_token": "taken",
}  # fmt: skip
GPU_COLUMNS = {
    "id": "GPU", "bf16_tflops": "bf16 TF/s", "fp8_tflops": "fp8 TF/s", "memory_gib": "GiB", "memory_gb_per_s": "GB/s", "link_gb_per_s": "link GB/s",
    "scaleup_gpus": "joined", "network_gbps_per_gpu": "net Gb/s", "tdp_w": "W", "usd_per_gpu_hour": "$/h",
}  # fmt: skip
PRICE_COLUMNS = {
    "gpu": "GPU", "provider": "provider", "usd_per_gpu_hour_low": "$/h", "usd_per_gpu_hour_high": "to", "kind": "kind",
    "date": "date",
}  # fmt: skip


def _show(rows: list[dict[str, object]], columns: dict[str, str], match: str, json_: bool, csv_: bool, markdown: bool) -> None:
    from ..errors import SpecError, nearest
    from ..units import format_count
    from .output import print_rows, table_format

    form = table_format(json_, csv_, markdown)
    found = [r for r in rows if match.lower() in " ".join(str(v) for v in r.values()).lower()]
    if match and not found:
        first = [str(next(iter(r.values()))) for r in rows]
        raise SpecError(f"nothing contains {match[:60]!r}", "catalogue", nearest(match, first))
    if form == "table":
        counts = ("parameters", "active_parameters")
        found = [{t: format_count(row[k]) if k in counts else row[k] for k, t in columns.items()} for row in found]  # type: ignore[arg-type]
    print_rows(found, form)


def models(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """The models that a plan can name.

    Example: trainwright models llama --markdown
    """
    from ..catalog.load import list_models

    _show(list_models(), MODEL_COLUMNS, match, json_, csv_, markdown)


def gpus(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """The GPUs: dense peaks, memory, bandwidths per GPU and per direction, power, price.

    Example: trainwright gpus H100 --json
    """
    from ..catalog.load import list_gpus

    _show(list_gpus(), GPU_COLUMNS, match, json_, csv_, markdown)


def prices(match: Match = "", json_: Json = False, csv_: Csv = False, markdown: Markdown = False) -> None:
    """Prices in dollars per GPU-hour, with provider, kind, date and source.

    Example: trainwright prices H100 --csv
    """
    from ..catalog.load import list_prices

    _show(list_prices(), PRICE_COLUMNS, match, json_, csv_, markdown)


def register(app: typer.Typer) -> None:
    for command in (models, gpus, prices):
        app.command()(command)
