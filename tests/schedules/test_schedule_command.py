"""``trainwright schedule``: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from trainwright.cli import main
from trainwright.schedules.replay import schedule


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["schedule", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_text_shows_the_picture_and_all_bubbles(capsys):
    status, out, err = run(capsys, "1f1b", "--stages", "4", "--microbatches", "8")
    assert (status, err) == (0, "")
    for word in ("rank 3", "F0", "B7", "33", "27.27%", "37.50%", "1 to 4", "ramp 6"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_equals_the_library(capsys):
    status, out, _ = run(capsys, "interleaved-1f1b", "--stages", "4", "--microbatches", "8", "--virtual", "2", "--p2p", "0.25", "--json")
    found, want = json.loads(out), schedule("interleaved-1f1b", 4, 8, 2, p2p=0.25)
    assert status == 0
    for key in ("makespan", "bubble_total", "bubble_useful", "bubble_span", "peak_per_rank", "messages"):
        assert found[key] == getattr(want, key)


@pytest.mark.parametrize("suffix", ["html", "svg", "json", "trace.json", "csv"])
def test_writes_what_the_name_asks_for(capsys, tmp_path, suffix):
    target = tmp_path / f"timeline.{suffix}"
    status, _, err = run(capsys, "zb-h1", "--weight", "1", "-o", str(target))
    assert status == 0
    assert str(target) in err.replace("\n", "")
    text = target.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [target.name], "nothing temporary is left"
    if suffix.endswith("json"):
        json.loads(text)
    begins = {"html": "<!doctype html>", "svg": "<svg ", "json": "{", "trace.json": "{", "csv": "0F0,"}
    assert text.startswith(begins[suffix])


def test_json_file_holds_every_action(capsys, tmp_path):
    target = tmp_path / "t.json"
    run(capsys, "1f1b", "-o", str(target))
    found = json.loads(target.read_text())
    assert len(found["actions"]) == 64
    assert found["actions"][0] == {"rank": 0, "kind": "F", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0, "overlapped": False}


def test_a_users_file_is_replayed_and_checked(capsys, tmp_path):
    target = tmp_path / "mine.csv"
    run(capsys, "zb-v", "--stages", "2", "--microbatches", "4", "-o", str(target))
    status, out, _ = run(capsys, str(target), "--backward", "1", "--weight", "1", "--json")
    assert (status, json.loads(out)["makespan"]) == (0, 12.5)
    target.write_text("0F0,0B0\n1F0\n")
    status, out, err = run(capsys, str(target))
    assert (status, out) == (2, "")
    assert "missing" in err


def test_two_schedules_at_equal_memory(capsys, tmp_path):
    status, out, _ = run(
        capsys, "interleaved-1f1b", "--virtual", "2", "--versus", "zb-v", "--backward", "1", "--weight", "1", "-o", str(tmp_path / "t.html")
    )
    assert status == 0
    assert "At equal memory (4 microbatches' activations): interleaved-1f1b runs 12" in out.replace("\n", " ")
    assert (tmp_path / "t.html").read_text().count("<h1>") == 1
    status, out, _ = run(capsys, "1f1b", "--versus", "dualpipe", "--as-is", "--json")
    assert [s["weight_copies"] for s in json.loads(out)["schedules"]] == [1, 2]


def test_automatic_optimal_and_trade_off(capsys):
    status, out, _ = run(capsys, "automatic", "--memory", "3", "--backward", "1", "--weight", "1", "--json")
    assert (status, json.loads(out)["makespan"]) == (0, 26.5)
    pytest.importorskip("ortools")
    status, out, _ = run(capsys, "optimal", "--memory", "4", "--backward", "1", "--weight", "1", "--json")
    assert json.loads(out)["makespan"] == 27
    assert json.loads(out)["note"].startswith("Proven optimal")
    status, out, _ = run(capsys, "--trade-off", "--backward", "1", "--weight", "1", "--json")
    assert [r["makespan"] for r in json.loads(out)][-1] == 25.5


def test_without_a_name_it_lists_them(capsys):
    status, out, _ = run(capsys, "--json")
    assert status == 0
    assert {"1f1b", "zb-v", "dualpipe"} <= {r["schedule"] for r in json.loads(out)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1f2b"], "1f1b"),
        (["dualpipe", "--microbatches", "6"], "nearest: 8"),
        (["dualpipe", "--stages", "3"], "nearest: 2, 4"),
        (["interleaved-1f1b", "--microbatches", "6"], "nearest: 4, 8"),
        (["zb-v", "--virtual", "3"], "nearest: 2"),
        (["1f1b", "--stages", "0"], "stages"),
        (["1f1b", "--forward", "-1"], "negative"),
        (["1f1b", "--forward", "0"], "forward"),
        (["1f1b", "--forward", "1,2"], "forward"),
        (["1f1b", "--forward", "one"], "not a number"),
        (["1f1b", "--p2p", "nan"], "p2p"),
        (["1f1b", "-o", "picture.png"], "timeline.html"),
        (["1f1b", "--versus", "gpipe", "-o", "x.csv"], "one schedule"),
        (["automatic", "--recompute", "1"], "recompute"),
        (["automatic", "--memory", "0.5"], "one microbatch"),
        (["nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_input_is_one_line_and_status_two(capsys, arguments, says):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_is_not_overwritten(capsys, tmp_path):
    folder = tmp_path / "x.svg"
    folder.mkdir()
    status, _, err = run(capsys, "1f1b", "-o", str(folder))
    assert status == 2
    assert "folder" in err


def test_the_drawing_is_as_wide_as_asked(capsys, tmp_path):
    target = tmp_path / "t.svg"
    run(capsys, "1f1b", "-o", str(target), "--width", "1234")
    assert 'width="1234"' in target.read_text()[:120]


def test_a_step_beyond_all_measure_is_refused_at_once(capsys):
    for arguments in (["1f1b", "--microbatches", "1000000000"], ["gpipe", "--stages", "1000000000"]):
        status, _, err = run(capsys, *arguments)
        assert status == 2
        assert "20,000,000 actions" in err


def test_names_of_files_are_shown_as_they_are(capsys, tmp_path):
    target = tmp_path / "[bold]a&b<c>.csv"
    target.write_text("0F0,0B0\n")
    status, out, _ = run(capsys, str(target), "-o", str(tmp_path / "t.html"))
    assert status == 0
    assert "[bold]a&b<c>.csv" in out.replace("\n", "")
    assert "<c>" not in (tmp_path / "t.html").read_text()


def test_messages_take_latency_and_bandwidth(capsys):
    _, out, _ = run(capsys, "1f1b", "--p2p", "0.25", "--message-bytes", "100", "--bandwidth", "400", "--json")
    assert json.loads(out)["makespan"] == schedule("1f1b", 4, 8, p2p=0.5).makespan
    status, _, err = run(capsys, "1f1b", "--bandwidth", "0")
    assert (status, "bandwidth" in err) == (2, True)
