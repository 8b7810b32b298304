"""Prices: dated, sourced, and a default that is a stated statistic."""

from __future__ import annotations

from statistics import median

import pytest

from trainwright.catalog import tables
from trainwright.catalog.load import default_price, list_prices

ROWS = tables.rows("prices.csv")
GPUS = {row["id"] for row in tables.rows("gpus.csv")}


def test_every_price_has_a_date_a_source_and_a_known_gpu() -> None:
    for row in ROWS:
        assert row["source"]
        assert row["date"]
        assert 2023 <= int(row["year"]) <= 2030
        assert row["gpu"] in GPUS
        assert row["kind"] in ("on-demand", "spot", "market", "commitment", "assumption", "doubtful")
        assert 0 < float(row["usd_low"]) <= float(row["usd_high"]) < 100


def test_the_default_is_the_median_over_providers() -> None:
    """H100 by hand: nine providers' on-demand prices of 2026, a range by its middle."""
    by_hand = [6.88, 3.99, 2.95, (3.5 + 5) / 2, (2.5 + 3.5) / 2, (1.99 + 2.5) / 2, (2.49 + 3.99) / 2, (1.49 + 2.1) / 2, 10.9791]
    usd, source = default_price("H100-SXM-80GB")
    assert usd == pytest.approx(median(by_hand))
    assert source == "median of 9 providers, on-demand, 2026"


def test_two_sizes_of_one_provider_count_once() -> None:
    usd, _ = default_price("B200-SXM-180GB")
    assert usd == pytest.approx(median([14.2416, (6.99 + 6.69) / 2, 5.5, 11.277]))


def test_older_list_prices_count_only_where_there_is_nothing_newer() -> None:
    assert default_price("GB200-NVL72") == (10.5, "CoreWeave, on-demand, 2025")


@pytest.mark.parametrize(("gpu", "kind"), [("RTX-4090-24GB", "market"), ("H800-SXM-80GB", "assumption")])
def test_what_is_not_sold_on_demand_falls_back_to_the_next_kind(gpu: str, kind: str) -> None:
    usd, source = default_price(gpu)
    assert usd is not None
    assert f", {kind}, " in source


def test_spot_and_doubtful_prices_never_count() -> None:
    sold = {row["gpu"] for row in ROWS if row["kind"] not in ("spot", "doubtful")}
    assert {gpu for gpu in GPUS if default_price(gpu)[0] is not None} == sold


def test_a_gpu_without_a_price_says_so() -> None:
    assert default_price("MI300X") == (None, "no price of MI300X is in the catalogue")


def test_the_table_for_people_lists_every_price() -> None:
    listed = list_prices()
    assert len(listed) == len(ROWS)
    assert all(row["usd_per_gpu_hour_low"] <= row["usd_per_gpu_hour_high"] for row in listed)
