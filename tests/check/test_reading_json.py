"""JSON: every key knows its line; what no parser takes is read on with a problem; what nobody can read is one fatal problem."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.check.syntax import read

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def kinds(document):
    return [p.kind for p in document.problems]


@given(TREES, st.sampled_from([None, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_what_json_reads_is_read_alike_without_a_problem(tree, indent):
    text = json.dumps({"a": tree}, indent=indent)
    (document,) = read("x.json", text)
    assert document.data == {"a": tree}
    assert document.problems == ()


def test_each_key_stands_on_its_line():
    (document,) = read("ds.json", '{\n  "zero_optimization": {\n    "stage": 3,\n    "betas": [0.9,\n      0.95]\n  }\n}\n')
    assert document.lines[("zero_optimization",)] == 2
    assert document.lines[("zero_optimization", "stage")] == 3
    assert document.lines[("zero_optimization", "betas", 1)] == 5
    assert document.line(("zero_optimization", "missing")) == 2, "the nearest key above"


@pytest.mark.parametrize(
    ("text", "kind", "data"),
    [
        ('{"a": 1, // why\n "b": 2}', "comment", {"a": 1, "b": 2}),
        ('{"a": 1, /* why */ "b": 2}', "comment", {"a": 1, "b": 2}),
        ('{\n# why\n"a": 1}', "comment", {"a": 1}),
        ('{"a": 1,}', "comma", {"a": 1}),
        ('{"a": 1\n "b": 2}', "comma", {"a": 1, "b": 2}),
        ('{"a": 1, "a": 2}', "duplicate-key", {"a": 2}),
        ('{"a": CONFIG_BATCH}', "placeholder", {"a": "CONFIG_BATCH"}),
        ('{"a": ${zero_stage}}', "placeholder", {"a": "${zero_stage}"}),
        ('{"a": 500_000}', "number", {"a": 500_000}),
        ("{'a': True}", "broken", {"a": True}),
        ('\ufeff{"a": 1}', "bom", {"a": 1}),
    ],
)
def test_liberties_are_read_and_named(text, kind, data):
    (document,) = read("x.json", text)
    assert document.data == data
    assert kind in kinds(document)
    assert not any(p.fatal for p in document.problems)


def test_the_second_of_two_keys_names_the_line_of_the_first():
    (document,) = read("x.json", '{\n"fp16": 1,\n"bf16": 2,\n"fp16": 3}')
    (problem,) = document.problems
    assert (problem.line, problem.path) == (4, ("fp16",))
    assert "line 2" in problem.message


@pytest.mark.parametrize("text", ['{"a": ', '{"a" 1}', '{"a": "b', "{", '{"a": 1}}', '{"a": 1] ', "", "   "])
def test_what_cannot_be_read_is_one_fatal_problem(text):
    (document,) = read("x.json", text)
    (problem,) = document.problems
    assert problem.fatal
    assert problem.kind == "broken"
    assert document.data is None
