"""A bare size becomes a Llama of about that size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.models.by_size import LARGEST, SMALLEST, model_of_size, shape_of_size
from trainwright.models.llama import build


@settings(max_examples=300, deadline=None)
@given(st.floats(7, 14).map(lambda power: 10**power))
def test_every_size_is_met_within_the_stated_deviation(wanted: float) -> None:
    wanted = min(max(wanted, SMALLEST), LARGEST)
    config = shape_of_size(wanted)
    model = build(config, "x")
    assert abs(model.parameters / wanted - 1) < (0.03 if wanted >= 1e8 else 0.06)
    assert config["intermediate_size"] % 256 == 0
    assert config["hidden_size"] % 128 == 0
    assert model.num_layers % 2 == 0
    assert model.heads % model.kv_heads == 0
    assert wanted < 2e8 or model.heads % 8 == 0
    assert model.head_dim == (64 if wanted < 2e9 else 128)


@pytest.mark.parametrize(("text", "layers", "hidden"), [("8B", 32, 4096), ("70B", 80, 8192), ("125M", 12, 768)])
def test_well_known_sizes_get_their_well_known_shape(text: str, layers: int, hidden: int) -> None:
    model = model_of_size(text)
    assert (model.num_layers, model.hidden) == (layers, hidden)


def test_eight_billion_is_llama_3() -> None:
    assert model_of_size("8B").parameters == 8030261248


@pytest.mark.parametrize("text", ["7B", "7b", " 7 B ", "7_000M", "7,000M", "0.007T"])
def test_one_size_has_many_spellings(text: str) -> None:
    assert model_of_size(text).parameters == model_of_size("7B").parameters


def test_the_note_says_what_it_came_to() -> None:
    model = model_of_size("7B")
    assert f"{model.parameters:,}" in model.notes[0]
    assert "% of what was asked" in model.notes[0]


@pytest.mark.parametrize("text", ["1M", "0B", "1000T"])
def test_sizes_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not between 10M and 100T"):
        model_of_size(text)
