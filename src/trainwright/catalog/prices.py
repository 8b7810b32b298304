"""Prices: ``prices.csv``, dollars per GPU-hour with provider, kind, date and source in every row.

The default price of a GPU is the median over providers of their current on-demand prices (each provider once, by its own median; a
published range by its middle). Current is the catalogue's newest year of that kind; list prices of earlier years count only where there is none.
Where nothing is on demand: market offers, then commitments, then what a publication assumed. Spot prices, and rows marked doubtful (parts of a
machine, prices below their own spot price), never count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..errors import SpecError, nearest
from . import tables
from .user_files import read_user_catalog

ORDER = ("on-demand", "market", "commitment", "assumption")
KEYS = ("gpu", "usd_per_gpu_hour", "provider", "region", "date", "source")


def default_price(gpu_id: str, catalog_files: Sequence[str] = ()) -> tuple[float | None, str]:
    """(dollars per GPU-hour, how and from when); (None, why) where no price of that GPU is known. A user's file wins."""
    own = [p for p in user_prices(catalog_files) if p["gpu"] == gpu_id]
    if own:
        return own[-1]["usd_low"], f"{own[-1]['source']}"
    rows = [row for row in tables.rows("prices.csv") if row["gpu"] == gpu_id]
    for kind in ORDER:
        found = [row for row in rows if row["kind"] == kind]
        if not found:
            continue
        year = max(int(row["year"]) for row in found)
        newest = [row for row in found if int(row["year"]) == year]
        by_provider: dict[str, list[float]] = {}
        for row in newest:
            by_provider.setdefault(row["provider"], []).append((float(row["usd_low"]) + float(row["usd_high"])) / 2)
        price = median(median(prices) for prices in by_provider.values())
        count = f"median of {len(by_provider)} providers" if len(by_provider) > 1 else next(iter(by_provider))
        return round(price, 4), f"{count}, {kind}, {year}"
    return None, f"no price of {gpu_id} is in the catalogue"


def user_prices(catalog_files: Sequence[str]) -> list[dict[str, Any]]:
    """The prices of a user's files, with GPUs by their id."""
    if not catalog_files:
        return []
    from .gpus import gpu_rows, resolve_gpu

    found: list[dict[str, Any]] = []
    known = gpu_rows(catalog_files)
    for table in read_user_catalog(catalog_files).prices:
        where = f"{table['_file']}: price of {table['gpu'][:40]!r}"
        for key in table:
            if key not in KEYS and key != "_file":
                raise SpecError(f"unknown key {key[:60]!r}", where, nearest(key, KEYS) or KEYS)
        usd = tables.number(table, "usd_per_gpu_hour", where, most=1e5, zero=True)
        if usd is None:
            raise SpecError("usd_per_gpu_hour is missing", where)
        row: dict[str, Any] = {key: str(table.get(key) or "") for key in KEYS}
        row |= {"gpu": resolve_gpu(table["gpu"], known, where), "usd_low": usd, "usd_high": usd, "kind": "own"}
        row["source"] = row["source"] or str(table["_file"])
        found.append(row)
    return found


def list_prices(catalog_files: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One plain row a price, for tables; a range has different low and high."""
    every: list[Mapping[str, Any]] = [*user_prices(catalog_files), *tables.rows("prices.csv")]
    return [
        {
            "gpu": row["gpu"],
            "provider": row.get("provider", ""),
            "usd_per_gpu_hour_low": float(row["usd_low"]),
            "usd_per_gpu_hour_high": float(row["usd_high"]),
            "kind": row["kind"],
            "region": row.get("region", ""),
            "date": row.get("date", ""),
            "source": row["source"],
            "confidence": row.get("confidence", "given by the user"),
        }
        for row in every
    ]
