"""`trainwright train` from the command line, on real ranks: killed, stopped, hung and resumed, with the same losses to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainwright.cli import main
from trainwright.report.run_trace import MEASURED

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak_kills.py"
LIMIT_S = 400
BOARD = importlib.util.find_spec("tensorboard") is not None


def _soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak_kills", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_kills"] = module
    spec.loader.exec_module(module)
    return module


soak_kills = _soak()
PLAN = soak_kills.PLAN.replace("vocab_size = 4096", "vocab_size = 257")


def train(folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainwright", "train", *more]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def began(process: subprocess.Popen[str], run: Path) -> None:
    """Waits for the first step."""
    soak_kills.until(lambda: losses(run) or process.poll() is not None, LIMIT_S)
    if not losses(run):
        raise AssertionError(ended(process))


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in soak_kills.events(run) if e["event"] == "step"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("run")
    (where / "plan.toml").write_text(PLAN)
    return where


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, float]:
    """The run that nothing happens to: 12 steps, a checkpoint every 4, with everything that can be watched."""
    board = ["--tensorboard"] if BOARD else []
    status, out, err = ended(train(folder, "plan.toml", "-o", "whole", "--steps", "12", "--json", "--profile", *board))
    assert status == 0, err
    assert "trace for ui.perfetto.dev: whole/traces/trace.json" in err
    document = json.loads(out)
    assert (document["word"], document["step"], document["saved"], document["resume"]) == ("done", 12, 12, None)
    return losses(folder / "whole")


def test_a_run_writes_its_losses_checkpoints_and_memory(folder: Path, whole: dict[int, float]) -> None:
    assert sorted(whole) == list(range(1, 13))
    assert whole[12] < whole[1] - 0.3
    run = folder / "whole"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-00000008", "step-00000012"]
    events = soak_kills.events(run)
    memory = next(e for e in events if e["event"] == "memory")
    assert memory["parameters"] == memory["gradients"]
    assert 2 * memory["parameters"] <= memory["optimizer"] <= 2 * memory["parameters"] + 8 * 40
    step = next(e for e in events if e["event"] == "step")
    assert step["tokens"] == 4 * 32
    assert 0 < step["mfu"] < 1


def test_one_trace_holds_the_predicted_step_and_both_ranks_measured_ones(folder: Path, whole: dict[int, float]) -> None:
    document = json.loads((folder / "whole" / "traces" / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "predicted, every rank", MEASURED: "measured rank 0", MEASURED + 1: "measured rank 1"}
    predicted = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert sum(e["dur"] for e in predicted) == pytest.approx(document["metadata"]["predicted_step_s"] * 1e6, rel=1e-6)
    for rank in range(2):
        kinds = {e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == MEASURED + rank}
        assert {"aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"} <= kinds
        assert any("all_gather" in k or "allgather" in k for k in kinds), "the collectives of FSDP2 are not in the trace"


@pytest.mark.skipif(not BOARD, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_losses_of_metrics_jsonl(folder: Path, whole: dict[int, float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "whole" / "tensorboard"))
    board.Reload()
    assert {e.step: e.value for e in board.Scalars("loss")} == pytest.approx(whole, rel=1e-6)
    assert {"gradient_norm", "rate", "tokens_per_s", "mfu"} <= set(board.Tags()["scalars"])


def test_a_run_is_not_written_over(folder: Path, whole: dict[int, float]) -> None:
    said = refused(folder, "plan.toml", "-o", "whole")
    assert said == "trainwright: whole: holds a run already (step 12) (nearest: trainwright train --resume whole, -o another folder)\n"


def test_sigterm_saves_and_ends_with_0_and_the_resumed_run_has_the_same_losses_to_the_bit(folder: Path, whole: dict[int, float]) -> None:
    run = folder / "stopped"
    process = train(folder, "plan.toml", "-o", str(run), "--steps", "100000", "--save-every", "0")
    began(process, run)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 0, err
    assert "stopped as asked, saved: step" in err
    assert f"go on with: trainwright train --resume {run}" in err.replace("\n", "")
    assert soak_kills.processes(run) == {}
    step = max(losses(run))
    if step < 12:
        status, _, err = ended(train(folder, "--resume", str(run), "--steps", "12"))
        assert status == 0, err
        assert f"going on from step {step}" in err
    found = losses(run)
    assert all(found[s] == whole[s] for s in range(1, 13))


@pytest.mark.slow
def test_another_layout_goes_on_with_the_same_losses(folder: Path, whole: dict[int, float]) -> None:
    """ZeRO-3 on two ranks, then DDP on one rank, then tensor parallelism on two."""
    (folder / "ddp.toml").write_text(PLAN.replace("2xA100", "1xA100").replace("fsdp2", "ddp").replace('sharding = "zero3"', ""))
    (folder / "tp.toml").write_text(PLAN.replace('sharding = "zero3"', 'sharding = "none"\ntp = 2\nsequence_parallel = true'))
    started = "moved"
    (folder / started / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl"):
        (folder / started / name).write_bytes((folder / "whole" / name).read_bytes())
    import shutil

    shutil.copytree(folder / "whole" / "checkpoints" / "step-00000008", folder / started / "checkpoints" / "step-00000008")
    (folder / started / "checkpoints" / "latest").write_text("step-00000008\n")
    (folder / started / "metrics.jsonl").unlink()
    for plan, steps in (("ddp.toml", "10"), ("tp.toml", "12")):
        status, _, err = ended(train(folder, plan, "--resume", started, "--steps", steps, "--warmup-steps", "0"))
        assert status == 0, err
    found = losses(folder / started)
    assert sorted(found) == [9, 10, 11, 12]
    assert all(abs(found[s] - whole[s]) < 1e-4 for s in found), (found, whole)
    assert abs(found[9] - whole[9]) < 2e-6


def test_three_kills_one_of_them_while_saving_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = soak_kills.soak(tmp_path, 3, seed=1, others=False)
    assert report.wrong == []
    assert report.kills == 3
    assert report.while_saving >= 1
    assert report.starts >= 4


@pytest.mark.slow
def test_a_hang_names_the_rank_and_the_collective(folder: Path) -> None:
    run = folder / "hung"
    process = train(folder, "plan.toml", "-o", str(run), "--steps", "100000", "--timeout-s", "12", "--restarts", "0", "--save-every", "0")
    began(process, run)
    ranks = {rank_of(pid): pid for pid, what in soak_kills.processes(run).items() if what == "rank"}
    os.kill(ranks[1], signal.SIGSTOP)
    try:
        status, _, err = ended(process)
    finally:
        if ranks[1] in soak_kills.processes(run):
            os.kill(ranks[1], signal.SIGKILL)
    assert status == 1, err
    line = err.strip().splitlines()[-1]
    assert "nothing moved for" in line, err
    assert "rank 1 did not come to" in line
    assert any(k in line for k in ("all_reduce", "all_gather", "allgather", "reduce_scatter")), line
    assert soak_kills.until(lambda: not soak_kills.processes(run), 20)


def rank_of(pid: int) -> int:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(w[5:]) for w in words if w.startswith(b"RANK="))


@pytest.mark.slow
def test_a_loss_that_jumps_ends_the_run_and_keeps_the_checkpoint(folder: Path) -> None:
    flags = ("--learning-rate", "10", "--clip", "0", "--warmup-steps", "500", "--min-learning-rate", "10")
    process = train(folder, "plan.toml", "-o", "nan", "--steps", "400", "--save-every", "2", "--spike", "1.3", *flags)
    status, _, err = ended(process)
    assert status == 1, err
    line = err.strip().splitlines()[-2]
    assert line.startswith("trainwright: step "), err
    assert "is intact" in line
    assert err.strip().splitlines()[-1] == "go on with: trainwright train --resume nan"


# --- bad input: one line, no process, status 2


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def refused(folder: Path, *arguments: str, status: int = 2) -> str:
    """Standard error of a command that must end at once with one line."""
    import contextlib
    import io

    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code == status, err.getvalue()
    assert err.getvalue().count("\n") == 1, err.getvalue()
    return err.getvalue()


def wide(**more: Any) -> str:
    text = PLAN
    for old, new in more.items():
        text = text.replace(*new) if isinstance(new, tuple) else text.replace(old, new)
    return text


BAD: dict[str, tuple[str, tuple[str, ...], str]] = {
    "more ranks than devices": (
        PLAN.replace("2xA100", "4096xA100").replace("global_batch_size = 4", "global_batch_size = 4096"),
        (),
        "the plan needs",
    ),
    "a batch that does not divide": (PLAN.replace("global_batch_size = 4", "global_batch_size = 3"), (), "do not divide over dp 2"),
    "heads that do not divide": (PLAN.replace("2xA100", "3xA100").replace('sharding = "zero3"', "tp = 3"), (), "tp"),
    "a sequence longer than the model's": (PLAN.replace("seq_len = 32", "seq_len = 65"), (), "65 tokens, the model has 64 positions"),
    "no such data": (PLAN, ("--data", "nowhere.txt"), "nowhere.txt: there is no such file or folder"),
    "empty data": (PLAN, ("--data", "empty.txt"), "empty.txt: holds no text"),
    "a vocabulary below bytes": (PLAN.replace("257", "64"), (), "holds no bytes"),
    "another model's tokens": (PLAN, ("--data", "other.bin"), "other.bin: token 1 is 300, the model's vocabulary ends at 256"),
    "truncated tokens": (PLAN, ("--data", "odd.bin"), "odd.bin: 3 bytes are no whole number"),
    "no tokenizer": (PLAN, ("--tokenizer", "nowhere.json"), "there is no such tokenizer"),
    "a folder that is a file": (PLAN, ("-o", "empty.txt"), "empty.txt: cannot be written: File exists"),
    "a folder that cannot be made": (PLAN, ("-o", "/proc/run"), "/proc/run: cannot be written"),
    "nothing to resume": (PLAN, ("--resume", "nothing"), "is no folder of a run"),
    "a setting out of range": (PLAN, ("--learning-rate", "99"), "learning_rate: 99.0 is not between"),
    "an unknown setting of the file": (PLAN + "learning_rat = 1\n", (), "learning_rat"),
    "an option with a typo": (PLAN, ("--setps", "3"), "--setps"),
    "a host that is not known": (PLAN, ("--nodes", "2", "--node", "1", "--rendezvous", "no.such.host.invalid:29500"), "is not known"),
    "no rendezvous": (PLAN, ("--nodes", "2"), "is not HOST:PORT"),
    "machines that do not divide": (PLAN, ("--nodes", "3"), "2 ranks do not divide over 3 machines"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_rank_starts(name: str, folder: Path) -> None:
    plan, arguments, says = BAD[name]
    (folder / "bad.toml").write_text(plan)
    (folder / "empty.txt").write_text("\n")
    (folder / "other.bin").write_bytes(b"\x01\x00\x2c\x01")
    (folder / "odd.bin").write_bytes(b"\x01\x00\x02")
    assert says in refused(folder, "bad.toml", *(arguments if "-o" in arguments or "--resume" in arguments else ("-o", "bad", *arguments)))


def test_a_port_in_use_is_named_with_a_free_one(folder: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        place = f"127.0.0.1:{s.getsockname()[1]}"
        said = refused(folder, "plan.toml", "-o", "port", "--nodes", "2", "--rendezvous", place)
    assert f"{place}: the port is in use (nearest: 127.0.0.1:" in said


def test_a_rendezvous_that_does_not_answer_is_named(folder: Path) -> None:
    from trainwright.errors import SpecError
    from trainwright.train.launch import Place, check_rendezvous

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(SpecError, match=f"nobody answers at 127.0.0.1:{port}: Connection refused"):
        check_rendezvous(Place(2, 1, f"127.0.0.1:{port}"), patience_s=0.6)
    assert time.monotonic() - began < 5


def test_machines_are_counted_before_they_meet() -> None:
    from trainwright.errors import SpecError
    from trainwright.resolve import resolve
    from trainwright.spec.run import validate
    from trainwright.train.launch import Place, check_place
    from trainwright.train.settings import Settings

    run = resolve(validate({"model": "gpt2", "cluster": "2xH100"}))
    with pytest.raises(SpecError, match="--node: there is no machine 5 of 2: they count from 0"):
        check_place(run, Settings(), Place(2, 5))


def test_another_models_checkpoint_is_one_line_and_stays(folder: Path, whole: dict[int, float]) -> None:
    (folder / "wider.toml").write_text(PLAN.replace("num_hidden_layers = 2", "num_hidden_layers = 3"))
    before = sorted(p.name for p in (folder / "whole" / "checkpoints").iterdir())
    status, _, err = ended(train(folder, "wider.toml", "--resume", "whole", "--steps", "20"))
    assert status == 2, err
    assert "is a checkpoint of another model: layers 2 there, 3 here" in err
    assert "Traceback" not in err
    assert sorted(p.name for p in (folder / "whole" / "checkpoints").iterdir()) == before
