"""Numbers with units are read as people write them and printed as they read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.units import GIB, format_bytes, format_count, format_seconds, format_usd, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("2T", 2e12), ("15e12", 15e12), ("405B", 405e9), ("1_000", 1000), ("1,000", 1000), (" 7b ", 7e9), ("0.5k", 500), (".5M", 5e5)],
)
def test_counts(text: str, value: float) -> None:
    assert parse_count(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("30d", 2592000), ("12h", 43200), ("90min", 5400), ("45s", 45), ("1w", 604800)])
def test_durations(text: str, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "many", "-5", "nan", "inf", "1e999", "2X", "2 T T", "0x10", "1" * 100, "٣"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--tokens"):
        parse_count(text, "--tokens")


def test_a_duration_needs_its_unit() -> None:
    with pytest.raises(SpecError, match="unit of time"):
        parse_seconds("30")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (57 * GIB, "57.0 GiB"), (80 * GIB, "80.0 GiB"), (200 * GIB, "200 GiB"), (1.5 * 2**40, "1.5 TiB")],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (0.38, "380 ms"), (12.4, "12.4 s"), (11520, "3.2 h"), (1.512e6, "17.5 d"), (2e-6, "2 us")]
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_money_and_counts() -> None:
    assert format_usd(1.5) == "$1.50"
    assert format_usd(12345) == "$12,345"
    assert format_usd(1.24e6) == "$1.24M"
    assert format_count(70553706496) == "70.6B"
    assert format_count(12) == "12"


@given(st.floats(min_value=0, max_value=1e15))
def test_every_value_prints_with_a_unit(value: float) -> None:
    assert format_bytes(value).split()[1] in {"B", "KiB", "MiB", "GiB", "TiB"}
    assert format_seconds(value).split()[1] in {"us", "ms", "s", "min", "h", "d"}


@given(st.integers(min_value=0, max_value=999))
def test_what_is_printed_is_read_back(value: int) -> None:
    assert parse_count(format_count(value * 10**9)) == pytest.approx(value * 10**9)
