"""Mended files keep their comments and layout; reports come as text, annotations, SARIF and JSON; the command keeps its word about status and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.check.checks import CHECKS
from trainwright.check.convert import convert
from trainwright.check.findings import Change, Finding, Severity
from trainwright.check.fix import mend
from trainwright.check.output import render
from trainwright.check.read import read_document
from trainwright.check.run import check
from trainwright.check.setup import Place
from trainwright.check.spans import json_spans
from trainwright.cli import main
from trainwright.errors import SpecError

YAML = """# ours
compute_environment: LOCAL_MACHINE  # here
distributed_type: DEEPSPEED
deepspeed_config:
  # the stage
  zero_stage: 2
  zero3_init_flag: true  # from another file
  offload_param_device: none
num_machines: 1
num_processes: 8
machine_rank: 0
"""
JSON = '{\n  "train_micro_batch_size_per_gpu": 1,\n\n  "zero_optimization": {\n    "stage": 2,\n    "offload_param": {\n      "device": "cpu"\n    }\n  }\n}\n'


def changed(name: str, text: str, *changes: Change) -> str:
    finding = Finding("K00", Severity.ERROR, Place(name), "x.", "", changes)
    return mend(read_document(name, text), [finding], read_document).text


def test_a_value_is_set_where_it_stands() -> None:
    mended = changed("a.yaml", YAML, Change("a.yaml", ("deepspeed_config", "zero3_init_flag"), False))
    assert mended == YAML.replace("zero3_init_flag: true  # from", "zero3_init_flag: false  # from")


def test_a_key_is_removed_with_its_line() -> None:
    mended = changed("a.yaml", YAML, Change("a.yaml", ("deepspeed_config", "zero3_init_flag"), remove=True))
    assert mended == YAML.replace("  zero3_init_flag: true  # from another file\n", "")


def test_a_block_goes_whole_and_json_keeps_its_commas() -> None:
    mended = changed("d.json", JSON, Change("d.json", ("zero_optimization", "offload_param"), remove=True))
    assert json.loads(mended) == {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    assert mended.startswith('{\n  "train_micro_batch_size_per_gpu": 1,\n\n  "zero_optimization": {\n    "stage": 2')


def test_a_key_is_renamed() -> None:
    assert changed("d.json", '{"a": 1, "bb": 2}', Change("d.json", ("a",), rename="c")) == '{"c": 1, "bb": 2}'
    assert changed("a.yaml", "a: 1 # one\nb: 2\n", Change("a.yaml", ("a",), rename="c")) == "c: 1 # one\nb: 2\n"


def test_a_new_key_stands_with_its_siblings() -> None:
    assert changed("d.json", '{\n  "a": 1\n}\n', Change("d.json", ("b",), True)) == '{\n  "a": 1,\n  "b": true\n}\n'
    assert "\n  gradient_clipping: 1.0\n" in changed("a.yaml", YAML, Change("a.yaml", ("deepspeed_config", "gradient_clipping"), 1.0))


def test_what_cannot_be_placed_is_left_and_said() -> None:
    document = read_document("a.yaml", "a: {b: [1, 2]}\n")
    finding = Finding(
        "K00",
        Severity.ERROR,
        Place("a.yaml"),
        "x.",
        "",
        (Change("a.yaml", ("z", "y"), remove=True, rename=None), Change("a.yaml", ("q",), rename="r")),
    )
    mended = mend(document, [finding], read_document)
    assert (mended.text, mended.applied, mended.left) == (document.text, (), (finding,))


FLAT = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=8),
    st.one_of(st.integers(-5, 5), st.booleans(), st.text("xyz ", max_size=5)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(FLAT, st.data(), st.sampled_from([None, 2]), st.integers(0, 9))
def test_an_edit_changes_one_key_and_nothing_else(table: dict[str, object], data: st.DataObject, indent: int | None, value: int) -> None:
    key = data.draw(st.sampled_from(sorted(table)))
    text = json.dumps({"outer": table}, indent=indent)
    assert json.loads(changed("d.json", text, Change("d.json", ("outer", key), value))) == {"outer": {**table, key: value}}
    assert json.loads(changed("d.json", text, Change("d.json", ("outer", key), remove=True))) == {
        "outer": {k: v for k, v in table.items() if k != key}
    }


@given(FLAT)
def test_spans_hold_the_values(table: dict[str, object]) -> None:
    text = json.dumps(table, indent=1)
    assert {p[0]: json.loads(text[s.start : s.end]) for p, s in json_spans(text).items()} == table


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_mended_example_is_clean_of_what_was_mended(name: str) -> None:
    e = CHECKS[name].example
    report = check(e.files, e.launch, e.model or None, e.on or None)
    for file, text in e.files.items():
        own = [f for f in report.findings if f.check == name and f.changes]
        mended = mend(read_document(file, text), own, read_document)
        if mended.applied:
            again = check({**e.files, file: mended.text}, e.launch, e.model or None, e.on or None)
            left = {f.place.path for f in again.findings if f.check == name and f.severity > Severity.NOTE}
            assert not left & {f.place.path for f in mended.applied}


# --- reports ---------------------------------------------------------------------------------------------------------------------------------


def test_text_names_place_severity_and_check() -> None:
    text = render(check({"d.json": JSON}), "text")
    assert text.splitlines()[0].startswith("d.json:6: warning K05: ")
    assert text.splitlines()[-1] == "1 file (deepspeed): 1 warning"


def test_annotations_escape_what_ends_a_property() -> None:
    line = render(check({"a,b:c.json": JSON}), "github").splitlines()[0]
    assert line.startswith("::warning file=a%2Cb%3Ac.json,line=6,title=K05::")


def test_names_and_values_of_a_file_do_not_end_a_line_and_do_not_reach_the_terminal() -> None:
    report = check({"a\nb.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimizatoin\\u001b[31m": {"stage": 2}}'})
    lines = render(report, "text").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("a b.json:1: warning K01: zero_optimizatoin[31m is no key")
    assert all(line.isprintable() for line in lines)
    assert "\x1b" not in render(report, "github")


def test_sarif_has_a_rule_for_each_result() -> None:
    run = json.loads(render(check({"d.json": JSON}), "sarif"))["runs"][0]
    rules = [r["id"] for r in run["tool"]["driver"]["rules"]]
    assert run["results"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["locations"][0]["physicalLocation"]["region"]["startLine"] >= 1


# --- the command -----------------------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.json").write_text(JSON)
    return tmp_path


def test_status_is_one_where_an_error_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "d.json")[0] == 0
    (folder / "e.json").write_text('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    assert run(capsys, "e.json", "--json")[0] == 1


def test_json_is_one_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "d.json", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["files"] == [{"file": "d.json", "format": "deepspeed", "partial": False, "template": False}]


def test_a_folder_is_its_configurations_and_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text("deepspeed --num_gpus 8 train.py --deepspeed d.json\n")
    (folder / "README.md").write_text("no configuration")
    (folder / "more").mkdir()
    named = run(capsys, "d.json", "run.sh", "--json")
    assert run(capsys, str(folder), "--json")[1].replace(f"{folder}/", "") == named[1]


@pytest.mark.parametrize(
    "arguments",
    [[], ["missing.json"], ["empty"], ["d.json", "--format", "xml"], ["d.json", "--on", "eight"], ["d.json", "--ignore", "K77"], ["d.json", "-o",
        "x.json"], ["--about", "K77"],
     ["d.json", "--model", "no-such-model"]],
)  # fmt: skip
def test_wrong_input_is_one_line_and_status_two(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    (folder / "empty").mkdir()
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert len(err.splitlines()) == 1


def test_fix_mends_in_place_and_asks_before_it_replaces_another_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "taken.json").write_text("mine")
    assert run(capsys, "d.json", "--fix", "-o", "taken.json")[0] == 2
    assert (folder / "taken.json").read_text() == "mine"
    assert run(capsys, "d.json", "--fix", "-o", "new.json")[0] == 0
    assert (folder / "d.json").read_text() == JSON
    assert json.loads((folder / "new.json").read_text()) == {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    assert run(capsys, "d.json", "--fix")[0] == 0
    assert (folder / "d.json").read_text() == (folder / "new.json").read_text()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


BOTH = '{"train_micro_batch_size_per_gpu": 0, "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}'


def test_fix_says_what_was_mended_and_what_is_left_and_its_status_is_that_of_what_is_left(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "e.json").write_text(BOTH)
    status, out, err = run(capsys, "e.json", "--fix", "-o", "text.json")
    lines = out.splitlines()
    assert lines[0].startswith("e.json:1: mended K05: ")
    assert lines[1:3] == ["    removed zero_optimization.offload_param.", "1 mended; in the files as they are now:"]
    assert lines[3].startswith("text.json:1: error ")
    assert not any("K05" in line for line in lines[3:])
    assert (status, err) == (1, "wrote text.json: 1 mended\n")
    _, out, _ = run(capsys, "e.json", "--fix", "--json")
    said = json.loads(out)
    assert [(f["check"], f["changed"]) for f in said["mended"]] == [("K05", "removed zero_optimization.offload_param")]
    assert "K05" not in [f["check"] for f in said["findings"]]
    assert said["findings"] == json.loads(run(capsys, "e.json", "--json")[1])["findings"]


def test_nothing_is_written_where_one_file_of_several_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.cli.output.read_bytes", lambda name: JSON.encode())
    assert run(capsys, "d.json", "-", "--fix")[0] == 2
    assert (folder / "d.json").read_text() == JSON


def test_a_mended_file_keeps_its_permissions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "mine.json"
    file.write_text('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}')
    file.chmod(0o600)
    run(capsys, "mine.json", "--fix", "--on", "16xH100", "-o", "new.json")
    run(capsys, "mine.json", "--fix", "--on", "16xH100")
    assert file.stat().st_mode & 0o777 == (folder / "new.json").stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["train_batch_size"] == 3 * 2 * 16


@pytest.mark.parametrize("on", ["16xH100", "16×H100"])
def test_the_ranks_that_are_asked_about_decide_a_batch_where_a_launcher_names_those_of_one_machine(on: str) -> None:
    config = '{"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}'
    launch = "torchrun --nproc_per_node 8 train.py --deepspeed ds.json"
    found = next(f for f in check({"ds.json": config}, launch=launch, on=on).findings if f.check == "K02")
    assert [c.value for c in found.changes] == [3 * 4 * 16]


def test_utf_16_is_an_error_and_is_not_converted() -> None:
    """Editors of Windows write it, Python's ``open`` and with it every engine refuses it."""
    files = {"ds.json": '{"train_micro_batch_size_per_gpu": 1}'.encode("utf-16")}
    assert [f.what for f in check(files).findings if f.check == "K08"] == ["Is UTF-16, which no engine reads."]
    with pytest.raises(SpecError, match="UTF-16"):
        convert(files, "torchtitan", model="gpt2", on="8xH100")


def test_about_shows_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--about", "k05")
    assert status == 0
    assert "offload_param" in out
    assert "warning K05" in out


def test_a_readme_about_a_script_is_no_script() -> None:
    """`trainwright check set/*` reads it too."""
    report = check({"README.md": "2. Run: `torchrun train.py` on every node (`launch_elastic.sh` goes on)\n"})
    assert report.findings == ()


def test_a_file_of_no_known_format_is_not_said_to_be_right() -> None:
    said = render(check({"notes.json": '{"shopping": ["milk"]}'}), "text")
    assert "of no known format" in said
    assert "nothing found" not in said
