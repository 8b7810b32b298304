"""What a run notices by itself: losses that are none, ranks that do not come, a step that all agree on, a trace of predicted and measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.report.progress import RunView, memory_line, step_line
from trainwright.report.run_trace import MEASURED, write_run_trace
from trainwright.train.files import METRICS, read_errors, read_events, write_error

pytest.importorskip("torch")
from trainwright.train.hang import blame
from trainwright.train.launch import failed_rank
from trainwright.train.metrics import Metrics, matmul_flops
from trainwright.train.survive import Agreement, Diverged, Losses, Stop


def test_a_loss_that_is_no_number_ends_the_run_and_says_what_is_left() -> None:
    for loss in (math.nan, math.inf):
        with pytest.raises(Diverged, match=rf"step 7: the loss is {loss}; the checkpoint of step 5 is intact"):
            Losses().see(7, loss, "the checkpoint of step 5 is intact")


def test_a_jump_is_told_and_ends_the_run_only_beyond_the_factor() -> None:
    calm = [2.0 + 0.01 * (i % 3) for i in range(20)]
    for factor in (0.0, 1.5):
        losses = Losses(factor)
        assert [losses.see(i, x, "") for i, x in enumerate(calm)] == [None] * 20
        assert losses.see(20, 2.03, "") is None
        told = losses.see(21, 2.6, "")
        assert told is not None
        assert told.startswith("step 21: the loss jumped to 2.6")
    with pytest.raises(Diverged, match=r"jumped to 9, .* x the mean of the last 20"):
        losses.see(22, 9.0, "")


def test_of_several_failed_ranks_the_killed_one_is_blamed() -> None:
    """torchrun's table puts the rank first whose end it saw first, which may only have lost its connection."""
    one, other = ("rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 7)\n  ".format(*f) for f in ((1, -9), (0, 1)))
    table = f"[1]:\n  {one}Root Cause:\n  {other}"
    assert failed_rank(table) == "rank 1 was killed by signal 9"
    assert failed_rank(table.replace("-9", "3")) == "rank 0 ended with status 1"
    assert failed_rank("nothing of that kind") is None


def note(step: int, **groups: tuple[str, int, int]) -> dict[str, Any]:
    return {"step": step, "groups": {g: {"kind": k, "enqueued": e, "completed": c, "done": e == c} for g, (k, e, c) in groups.items()}}


def test_who_did_not_come_is_the_rank_without_a_note_or_without_the_collective() -> None:
    open_ = note(4, tp=("all_reduce", 9, 8), dp=("all_gather", 3, 3))
    line = "step 5: nothing moved for 30 s: rank 2 did not come to all_reduce over tp"
    assert blame({0: open_, 1: open_, 3: open_}, 4, 30) == line
    assert blame({0: open_, 1: open_, 2: note(4, tp=("all_reduce", 8, 8)), 3: open_}, 4, 30) == line
    assert "every rank waits in all_reduce over tp" in blame({0: open_, 1: open_}, 2, 30)
    assert "rank 1 does not go on; no collective is open" in blame({0: note(4)}, 2, 30)


def test_alone_a_rank_agrees_with_itself_and_a_file_asks_it_to_stop(tmp_path: Path) -> None:
    words, stop = Agreement(None), Stop(tmp_path)
    words.say(bool(stop), False)
    assert words.hear() == (False, False)
    (tmp_path / "stop").touch()
    words.say(bool(stop), True)
    assert words.hear() == (True, True)


def test_metrics_are_read_line_by_line_while_they_are_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, enabled=True)
    metrics.tell("step", step=1, loss=math.nan)
    events, at = read_events(tmp_path)
    assert [(e["event"], e["step"], e["loss"]) for e in events] == [("step", 1, "nan")]
    with (tmp_path / METRICS).open("a") as f:
        f.write('{"event": "st')
    assert read_events(tmp_path, at) == ([], at)
    metrics.close()
    Metrics(tmp_path / "other", enabled=False).tell("step", step=1)
    assert not (tmp_path / "other").exists()


def test_the_final_error_of_the_lowest_rank_is_the_one_that_is_told(tmp_path: Path) -> None:
    write_error(tmp_path, 0, 0, "lost", final=False, status=1)
    write_error(tmp_path, 1, 0, "real", final=True, status=2)
    write_error(tmp_path, 0, 1, "later", final=False, status=1)
    assert [e["message"] for e in read_errors(tmp_path)] == ["real", "later", "lost"]


def test_a_line_says_loss_speed_share_and_time_left() -> None:
    event = {"loss": 2.5, "tokens_per_s": 12345.6, "mfu": 0.314, "gradient_norm": 1.0}
    assert step_line(event, 90) == "loss 2.5000  12,346 tokens/s  MFU 31.4%  norm 1.0000  ETA 90 s"
    assert (
        memory_line({"event": "memory", "master_weights": 2**21, "parameters": 2**20, "optimizer": 2**22})
        == "memory of rank 0: fp32 masters 2.0 MiB, parameters 1.0 MiB, optimizer 4.0 MiB"
    )


def test_a_cpu_is_held_against_products_as_layers_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both factors laid out by rows 16 bits take ten times as long on a CPU, and MFU was 150 %."""
    import torch

    made = []
    whole = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda a, b: made.append(b.dtype) or whole(a, b))
    assert matmul_flops(torch.device("cpu"), torch.bfloat16, 0.0) > 0
    assert made == [torch.bfloat16]


def test_time_left_is_that_of_the_last_steps() -> None:
    from rich.console import Console

    clock = iter(range(100))
    view = RunView(Console(quiet=True), "x", 40, clock=lambda: float(next(clock)))
    for step in (10, 20, 30):
        view.see({"event": "step", "step": step, "loss": 1.0, "gradient_norm": 1.0})
    assert view.remaining() == pytest.approx(1.0)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_trace_holds_the_predicted_step_and_every_measured_rank(pp: int, tmp_path: Path) -> None:
    estimate = tw.estimate(
        {"model": "gpt2", "cluster": "2xH100", "training": {"global_batch_size": 8, "seq_len": 256}, "strategy": {"pp": pp}}
    )
    assert write_run_trace(tmp_path, estimate) is None
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        event = {"name": "aten::mm", "cat": "cpu_op", "ph": "X", "pid": 1, "tid": 7, "ts": 1e9 + rank, "dur": 5.0}
        (tmp_path / "traces" / f"rank-{rank:05d}.json").write_text(json.dumps({"traceEvents": [event, {"ph": "M", "name": "x"}]}))
    path = write_run_trace(tmp_path, estimate)
    assert path is not None
    events = json.loads(path.read_text())["traceEvents"]
    measured = [e for e in events if e["ph"] == "X" and e["pid"] >= MEASURED]
    assert [(e["pid"] - MEASURED, e["ts"], e["dur"]) for e in measured] == [(0, 0, 5), (1, 0, 5)]
    predicted = [e for e in events if e["ph"] == "X" and e["pid"] < MEASURED]
    assert max(e["ts"] + e["dur"] for e in predicted) == pytest.approx(estimate.step_s * 1e6, rel=1e-3)
