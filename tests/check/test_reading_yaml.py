"""YAML and TOML: lines, tags as data, bounded aliases, tabs, templates; numbers as YAML 1.1 has them."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.check.syntax import read
from trainwright.emit.yaml import dump

from .test_reading_json import TREES, kinds


@given(st.dictionaries(st.text(alphabet="abcdefgh_", min_size=1, max_size=6), TREES, min_size=1, max_size=5))
@example({"_": {"<<": None}})  # quoted, it merges nothing
@settings(max_examples=120, deadline=None)
def test_what_the_safe_loader_reads_is_read_alike(tree):
    text = yaml.safe_dump(tree, sort_keys=False)
    (document,) = read("x.yaml", text)
    assert document.data == yaml.safe_load(text)


@given(
    st.dictionaries(
        st.text(alphabet="abcdefgh_", min_size=1, max_size=6), st.integers() | st.booleans() | st.text(max_size=8), min_size=1, max_size=5
    )
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_here_is_read_back_with_its_lines(tree):
    (document,) = read("x.yaml", dump(tree))
    assert document.data == tree
    for key, line in ((p[0], n) for p, n in document.lines.items() if len(p) == 1):
        assert dump(tree).splitlines()[line - 1].startswith((str(key), '"'))


def test_a_number_without_a_dot_is_a_text_as_in_every_yaml_1_1_reader():
    (document,) = read("x.yaml", "learning_rate: 2e-5\nlr: 2.0e-5\nsteps: 500_000\nempty:\nyes_word: yes\n")
    assert document.data == {"learning_rate": "2e-5", "lr": 2.0e-5, "steps": 500_000, "empty": None, "yes_word": True}


def test_a_tag_is_data_and_runs_nothing(tmp_path):
    target = tmp_path / "made"
    (document,) = read("x.yaml", f'a: !!python/object/apply:os.system ["touch {target}"]\nb: !include other.yaml\n')
    assert document.data == {"a": [f"touch {target}"], "b": "other.yaml"}
    assert kinds(document) == ["tag", "tag"]
    assert not target.exists()


def test_merge_keys_and_anchors_unfold():
    (document,) = read("x.yaml", "base: &base\n  lr: 1.0\n  steps: 3\nrun:\n  <<: *base\n  steps: 5\n")
    assert document.data["run"] == {"lr": 1.0, "steps": 5}
    assert document.line(("run", "steps")) == 6


def test_anchors_that_explode_are_one_problem():
    rows = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    rows += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)]
    (document,) = read("x.yaml", "\n".join(rows))
    assert kinds(document) == ["anchors"]
    assert document.data is None


def test_duplicate_keys_keep_the_last_and_name_the_first():
    (document,) = read("x.yaml", "gradient_checkpointing: true\nlr: 1.0\ngradient_checkpointing: false\n")
    (problem,) = document.problems
    assert (problem.kind, problem.line) == ("duplicate-key", 3)
    assert document.data["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a:\n\tb: 1\n", "tab"),
        ("a: {{ .Values.x }}\nb: 1\n", "template"),
        ("{{- if .Values.on }}\na: 1\n{{- end }}\n", "template"),
        ('{\n  # a comment\n  "pipe-parallel-size": 1\n\t"num-layers": 2,\n}\n', "comma"),
    ],
)
def test_a_second_way_to_read(text, kind):
    (document,) = read("x.yml", text)
    assert kind in kinds(document)
    assert isinstance(document.data, dict)


def test_jinja_in_a_block_scalar_is_data():
    (document,) = read("x.yaml", "chat_template: |\n  {% for m in messages %}{{ m.content }}{% endfor %}\nlr: 1.0\n")
    assert document.problems == ()
    assert "endfor" in document.data["chat_template"]


def test_merge_markers_are_named_with_their_line():
    (document,) = read("x.yaml", "a: 1\n<<<<<<< HEAD\nb: 2\n=======\nb: 3\n>>>>>>> other\n")
    assert ("merge-marker", 2) in [(p.kind, p.line) for p in document.problems]


def test_several_documents_are_several_parts():
    first, second = read("k8s.yaml", "kind: A\n---\nkind: B\n")
    assert (first.part, second.part) == ("", "document 2")
    assert second.lines[("kind",)] == 3


def test_toml_keys_have_lines():
    (document,) = read(
        "train.toml",
        '[training]\nseq_len = 8192\ntext = """\nx = 1\n"""\n[parallelism]\ntensor_parallel_degree = 2\n[[a.b]]\nc = [\n 1,\n]\nd.e = 1\n',
    )
    assert document.lines[("training", "seq_len")] == 2
    assert document.lines[("parallelism", "tensor_parallel_degree")] == 7
    assert document.lines[("a", "b", 0, "d", "e")] == 12
    assert ("training", "x") not in document.lines


@pytest.mark.parametrize(("text", "line"), [("a = 1\nb = = 2\n", 2), ("[a]\nx = 1\nx = 2\n", 3)])
def test_broken_toml_names_the_line(text, line):
    (document,) = read("train.toml", text)
    (problem,) = document.problems
    assert problem.fatal
    assert problem.line == line
