"""Naming a model: by id, alias, hub name, size, file, folder or table; anything else is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.catalog import tables
from trainwright.catalog.load import list_models, load_model
from trainwright.errors import SpecError

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama-3.1-70b", "llama-3.1-70b"), ("LLAMA_3.1 70B", "llama-3.1-70b"), ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"), ("Llama-3.1-8B", "llama-3.1-8b"), ("llama3.1-8b", "llama-3.1-8b"),
        ("gpt2-small", "gpt2"), ("openai-community/gpt2-xl", "gpt2-xl"), ("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"), ("mistral-7b", "mistral-7b-v0.1"), ("bloom", "bloom-176b"),
    ],
)  # fmt: skip
def test_the_names_people_use(name: str, found: str) -> None:
    assert load_model(name).name == found


def test_no_alias_names_two_models() -> None:
    owner: dict[str, str] = {}
    for name, row in tables.document("models.json").items():
        for alias in (name, row["hf_id"], *row["aliases"]):
            if alias:
                assert owner.setdefault(tables.plain(alias), name) == name, alias


def test_a_file_a_folder_and_a_table_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(SMALL))
    parameters = load_model(SMALL).parameters
    assert load_model(str(file)).parameters == load_model(str(folder)).parameters == parameters
    assert load_model(str(file)).name == load_model(str(folder)).name == "tiny"
    assert load_model(str(file), name_hint="mine").name == "mine"


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert load_model(str(file)).hidden == 64


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty"), (b"  \n", "is empty"), (b"{", "is not valid JSON: .* in line 1"), (b"[1, 2]", "holds list, not a table"),
        (b"3", "holds int, not a table"), (b"\x00\x01\x02", "is a binary file"), (b"\xff\xfe\xfa", "is not UTF-8"), (b"{}", "has no model_type"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"), (b'{"a": ' + b"9" * 5000 + b"}", "a number too long"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"), (b'{"model_type": "llama", "hidden_size": NaN}', "is not a whole number"),
        (b'{"model_type": "lama"}', "unknown model_type 'lama'"), (b" " * (10 * 2**20 + 1), "10 MiB, more than the 10"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=line) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("llama-3.1-71b", r"unknown model 'llama-3.1-71b' \(nearest: llama-3.1-"), ("", "names no model"), (7, "'7' names no model"),
        ("./nothing/config.json", "no such file"), ("x" * 100_000, "unknown model"), ("a\0b.json", "ab.json: "), ("7X", "unknown model '7X'"),
        ("1M", "is not between 10M and 100T"), ("meta-llama/Llama-9", "unknown model"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_one_line(reference: object, line: str) -> None:
    with pytest.raises(SpecError, match=line) as caught:
        load_model(reference)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a directory without a config"):
        load_model(str(tmp_path))


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SpecError, match="is a directory without a config"):
        load_model(str(tmp_path / "config.json"))


def test_one_model_and_one_gpu_load_alone() -> None:
    """Naming one model reads one configuration and imports one family: not the others, and no pydantic."""
    code = (
        "import sys; from trainwright.catalog.load import load_gpu, load_model; load_model('llama-3.1-70b'); load_gpu('h100'); "
        "loaded = [m for m in sys.modules if m.startswith(('trainwright.models.', 'pydantic', 'numpy'))]; print(sorted(loaded))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str([f"trainwright.models.{m}" for m in ("by_size", "keys", "layers", "llama", "parts")])


def test_the_table_for_people_lists_every_model() -> None:
    listed = list_models()
    assert [row["id"] for row in listed] == list(tables.document("models.json"))
    mixtral = next(row for row in listed if row["id"] == "mixtral-8x7b")
    assert (mixtral["experts"], mixtral["experts_per_token"], mixtral["parameters"]) == (8, 2, 46702792704)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.from_regex(r"[0-9.]{1,8}[KkMmBbTt]?"), st.text("./~-_ab7B", max_size=12)))
def test_any_text_is_a_model_or_one_line(text: str) -> None:
    try:
        assert load_model(text).parameters > 0
    except SpecError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1500


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_are_a_model_or_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value)
