"""An error is one line that says what was found, where, and what would be right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.errors import SpecError, TrainwrightError, nearest, one_line, unknown


def test_a_spec_error_is_a_value_error_and_ours() -> None:
    error = SpecError("7 does not divide 64 GPUs", "strategy.tp", [4, 8])
    assert isinstance(error, ValueError)
    assert isinstance(error, TrainwrightError)
    assert str(error) == "strategy.tp: 7 does not divide 64 GPUs (nearest: 4, 8)"


def test_what_is_not_known_is_left_out_of_the_line() -> None:
    assert str(SpecError("is empty")) == "is empty"
    assert str(SpecError("is empty", "run.toml")) == "run.toml: is empty"


@given(st.text(max_size=2000))
def test_whatever_a_user_typed_the_message_stays_one_printable_line(text: str) -> None:
    line = str(SpecError(text, "somewhere"))
    assert "\n" not in line
    assert "\r" not in line
    assert "\x1b" not in line
    assert len(line) < 700


@pytest.mark.parametrize(("word", "best"), [("lama", "llama"), ("GPT2", "gpt2"), ("qwen-2", "qwen2")])
def test_the_nearest_name_comes_first(word: str, best: str) -> None:
    assert nearest(word, ["llama", "gpt2", "qwen2", "bloom"])[0] == best


def test_where_nothing_is_like_it_a_short_list_is_shown_whole() -> None:
    assert "bloom, gpt2" in str(unknown("family", "zzzzzz", ["gpt2", "bloom"]))
    assert "nearest" not in str(unknown("family", "zzzzzz", [f"model-{i}" for i in range(100)]))


def test_one_line_cuts_what_is_too_long() -> None:
    assert one_line("x" * 1000, 10) == "xxxxxxx..."
