"""The run spec is checked at the door: what is accepted is meant, what is refused is named."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.spec.run import MAX_GPUS, ClusterSection, StrategySection, TrainingSection, parse_cluster, split_nodes, validate

MINIMAL = {"model": "llama-3.1-8b", "cluster": "8xH100"}


def test_the_shorthand_means_nodes_of_eight() -> None:
    spec = validate({"model": "7B", "cluster": "64xH100"})
    assert (spec.cluster.nodes, spec.cluster.gpus_per_node, spec.cluster.gpu) == (8, 8, "H100")


def test_a_prime_number_of_gpus_is_that_many_nodes() -> None:
    assert split_nodes(7) == {"nodes": 1, "gpus_per_node": 7}
    assert split_nodes(13) == {"nodes": 13, "gpus_per_node": 1}


@given(st.integers(1, MAX_GPUS))
def test_nodes_times_gpus_is_what_was_asked_for(total: int) -> None:
    split = split_nodes(total)
    assert split["nodes"] * split["gpus_per_node"] == total
    assert split["gpus_per_node"] <= 8


@pytest.mark.parametrize(
    ("word", "meant"), [("fsdp", "zero3"), ("ddp", "none"), ("hsdp", "zero3"), (3, "zero3"), ("0", "none"), ("ZeRO1", "zero1")]
)
def test_sharding_has_aliases(word: Any, meant: str) -> None:
    assert validate({**MINIMAL, "strategy": {"sharding": word}}).strategy.sharding == meant


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"foo": 1}, "unknown key 'foo'"),
        ({"strategy": {"shardin": "fsdp"}}, r"strategy: unknown key 'shardin' \(nearest: sharding"),
        ({"strategy": {"tensor_parallel": 8}}, "unknown key 'tensor_parallel'"),
        ({"strategy": {"tp": 0}}, "strategy.tp: 0"),
        ({"strategy": {"tp": -8}}, "strategy.tp: -8"),
        ({"strategy": {"tp": 2.5}}, "strategy.tp: 2.5"),
        ({"strategy": {"tp": True}}, "strategy.tp: True"),
        ({"strategy": {"tp": 10**12}}, "strategy.tp"),
        ({"strategy": {"schedule": "1fb1"}}, "nearest: 1f1b"),
        ({"strategy": {"framework_date": "2025-13"}}, "strategy.framework_date"),
        ({"training": {"precision": "bf61"}}, r"training.precision: 'bf61' .*nearest: bf16"),
        ({"training": {"tokens": float("nan")}}, "training.tokens"),
        ({"training": {"tokens": float("inf")}}, r"training.tokens: inf: .*nearest: 1e\+18"),
        ({"training": {"tokens": 2**64}}, r"training.tokens: 18446744073709551616: .*nearest: 1e\+18"),
        ({"training": {"tokens": "2T"}}, r"training.tokens: '2T': .*nearest: 2000000000000\)"),
        ({"training": {"seq_len": float("-inf")}}, r"training.seq_len: -inf: .*nearest: 1\)"),
        ({"training": {"seq_len": "long"}}, "training.seq_len"),
        ({"cluster": {"nodes": 8}}, "cluster.gpu: is missing"),
        ({"cluster": "H100"}, "is not a number of GPUs"),
        ({"cluster": "0xH100"}, "0 GPUs"),
        ({"cluster": "99999999999xH100"}, "GPUs are not between"),
        ({"cluster": []}, "cluster"),
        ({"model": 7}, "model"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], line: str) -> None:
    with pytest.raises(tw.SpecError, match=line) as caught:
        validate({**MINIMAL, **change})
    assert "\n" not in str(caught.value)


def fields() -> list[tuple[str, str, Any]]:
    sections = {"cluster": ClusterSection, "training": TrainingSection, "strategy": StrategySection}
    return [(section, name, field) for section, kind in sections.items() for name, field in kind.model_fields.items()]


@pytest.mark.parametrize("value", [-(10**15), -5, 10**19])
def test_every_number_out_of_range_is_refused_with_one_that_is_taken(value: int) -> None:
    numbers = [(s, n) for s, n, f in fields() if "int" in str(f.annotation) or "float" in str(f.annotation)]
    seen = 0
    for section, name in numbers:
        document = {
            "model": "7B",
            "cluster": {"gpu": "H100"},
            section: {"gpu": "H100", name: value} if section == "cluster" else {name: value},
        }
        with pytest.raises(tw.SpecError) as refused:
            validate(document)
        if "greater" not in refused.value.message and "less" not in refused.value.message:
            continue
        seen += 1
        for near in refused.value.nearest.split(", "):
            number = float(near)
            document[section][name] = int(number) if number.is_integer() else number
            validate(document)
    assert seen > 20


def test_a_date_is_shown_as_it_was_written() -> None:
    with pytest.raises(tw.SpecError, match=r"training.seq_len: 2024-01-01: "):
        validate({**MINIMAL, "training": {"seq_len": datetime.date(2024, 1, 1)}})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(tw.SpecError, match="model: is missing"):
        validate({"cluster": "8xH100"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "cluster", "training", "strategy", "x"]), json_values, max_size=5))
def test_any_document_is_a_spec_or_one_line(document: dict[str, Any]) -> None:
    try:
        validate(document)
    except tw.SpecError as error:
        assert "\n" not in str(error)


@given(st.sampled_from([ClusterSection, TrainingSection, StrategySection]), st.data(), json_values)
def test_any_value_of_any_key_is_taken_or_one_line(section: Any, data: Any, value: Any) -> None:
    key = data.draw(st.sampled_from(sorted(section.model_fields)))
    name = {ClusterSection: "cluster", TrainingSection: "training", StrategySection: "strategy"}[section]
    document = {**MINIMAL, name: {"gpu": "h100", key: value} if name == "cluster" else {key: value}}
    try:
        validate(document)
    except tw.SpecError as error:
        assert "\n" not in str(error)


def test_text_and_dict_and_path_say_the_same(tmp_path: Any) -> None:
    toml = 'model = "llama-3.1-8b"\ncluster = "8xH100"\n[strategy]\ntp = 2\n'
    path = tmp_path / "run.toml"
    path.write_text(toml)
    wanted = tw.load({**MINIMAL, "strategy": {"tp": 2}})
    assert tw.load(toml) == wanted
    assert tw.load(path) == wanted
    assert tw.load(str(path)) == wanted
    assert tw.load('{"model": "llama-3.1-8b", "cluster": "8xH100", "strategy": {"tp": 2}}') == wanted


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "is not text"),
        (b"{", "is no JSON"),
        (b"model = ", "is no JSON"),
        (b"[[[[", "is no"),
        (b"[1, 2]", "holds no table"),
        (b"[" * 100_000, "nested|is no"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Any, content: bytes, line: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(tw.SpecError, match=line) as caught:
        tw.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_or_nothing_is_no_run_spec(tmp_path: Any) -> None:
    with pytest.raises(tw.SpecError, match="is a folder"):
        tw.load(tmp_path)
    with pytest.raises(tw.SpecError, match="cannot be read"):
        tw.load(tmp_path / "none.toml")
    with pytest.raises(tw.SpecError):
        tw.load("\0")


def test_parse_cluster_reads_what_people_write() -> None:
    assert parse_cluster("8xA100-40GB")["gpu"] == "A100-40GB"
    assert parse_cluster("8 x H100")["gpu"] == "H100"


@pytest.mark.parametrize("source", [3, None, [], b"model", True])
def test_what_is_no_run_spec_at_all(source: Any) -> None:
    with pytest.raises(tw.SpecError, match="is no run spec"):
        tw.load(source)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bytes": "x"}, "bytes"),
        ({"bytes": float("nan")}, "bytes"),
        ({"cluster": 3}, "cluster"),
        ({"gpus": 1.5}, "gpus"),
        ({"gpus": 0}, "gpus"),
    ],
)
def test_a_collective_of_nonsense(change: dict[str, Any], says: str) -> None:
    with pytest.raises(tw.SpecError, match=says):
        tw.collective_time(**{"kind": "all_reduce", "bytes": 2**20, "cluster": "16xH100", "gpus": 16, **change})


@pytest.mark.parametrize("top", ["3", 1.5, 0])
def test_a_number_of_plans_that_is_none(top: Any) -> None:
    with pytest.raises(tw.SpecError, match="plans"):
        tw.plan({"model": "gpt2", "cluster": "1xH100"}, top=top)


@pytest.mark.parametrize("seq_len", [128, 1024])
def test_what_one_micro_batch_leaves_behind_is_never_negative(seq_len: int) -> None:
    """A pipeline stage of FSDP2 gathers its weights late and frees them: no saving of the activations that it keeps."""
    run = {"model": "llama-3.2-1b", "cluster": "32xB300", "training": {"seq_len": seq_len}, "strategy": {"framework": "fsdp2", "pp": 4}}
    assert tw.estimate(run).to_dict()["memory"]["saved_bytes"] > 0


def test_one_stage_has_no_bubble() -> None:
    """Exactly 0, not what is left of rounding."""
    for micro_batch in (1, 2, 4, 8, 16):
        run = {
            "model": "gpt2",
            "cluster": "1xRTX-4090",
            "training": {"global_batch_size": 512},
            "strategy": {"sharding": "none", "micro_batch_size": micro_batch},
        }
        assert tw.estimate(run).to_dict()["time"]["breakdown"]["bubble"] == 0
