"""Random SIGKILLs against a real run: no checkpoint lost, no wrong loss, no orphan.

    python benchmarks/soak_kills.py [--kills 200] [--seed 0] [--json]

Half of the kills strike while a checkpoint is being written. The victim is a rank, now and then torchrun or the launcher itself (then the run is resumed by
hand, as a person would). Afterwards the same run goes without a kill, and every loss that was ever written, repeated steps included, must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

PLAN = """
cluster = "2xA100-80GB"
[model]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 4096
max_position_embeddings = 64
[training]
seq_len = 32
global_batch_size = 4
precision = "fp32"
[strategy]
framework = "fsdp2"
sharding = "zero3"
[train]
learning_rate = 1e-3
min_learning_rate = 1e-3
warmup_steps = 0
save_every = 4
keep = 2
timeout_s = 60
"""
FOREVER = 1_000_000


@dataclass
class Report:
    """What happened; `wrong` empty is a pass."""

    kills: int = 0
    while_saving: int = 0
    half_written: int = 0
    victims: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    steps: int = 0
    steps_run: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainwright", "train", *more, "--restarts", "100000"]
    with (folder / "launcher.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def processes(run: Path) -> dict[int, str]:
    """Every living process of the run: {pid: launcher, torchrun or rank}."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z" or not any(str(run) == w or w.startswith(str(run) + "/") for w in words):
            continue
        if "trainwright.train.worker" in words and "trainwright.train.agent" not in words:
            found[int(entry.name)] = "rank"
        elif "trainwright.train.agent" in words:
            found[int(entry.name)] = "torchrun"
        elif "train" in words:
            found[int(entry.name)] = "launcher"
    return found


def events(run: Path) -> list[dict]:
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    out = []
    for line in lines:
        try:
            out.append(json.loads(line))
        except ValueError:  # the line that a kill cut
            continue
    return out


def latest(run: Path) -> int:
    try:
        return int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    except (OSError, ValueError):
        return 0


def being_written(run: Path) -> bool:
    return any(p.name.startswith("step-") for p in (run / "checkpoints").glob("*.tmp"))


def until(condition, limit_s: float = 400.0, pause_s: float = 0.02):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(pause_s)
    return None


def soak(folder: Path, kills: int, seed: int = 0, say=lambda line: None, others: bool = True) -> Report:
    """`others`: torchrun and the launcher are victims too (one kill in ten each)."""
    chance, report, began = random.Random(seed), Report(), time.monotonic()
    run = folder / "killed"
    (folder / "plan.toml").write_text(PLAN)
    launcher = start(folder, "plan.toml", "-o", str(run), "--steps", str(FOREVER))
    written = 0
    for number in range(kills):
        steps_before = sum(e.get("event") == "step" for e in events(run))
        if not until(lambda n=steps_before: sum(e.get("event") == "step" for e in events(run)) > n):
            report.wrong.append(f"kill {number}: the run did not go on in time")
            break
        saving = number % 2 == 0
        if saving:
            until(lambda: being_written(run), 60.0, 0.0005)
            time.sleep(chance.random() * 0.01)
        else:  # after a new checkpoint, or a busy machine would be killed before it has ever saved
            until(lambda n=written: latest(run) > n, 120.0)
            time.sleep(chance.random() * 1.0)
        if being_written(run):
            report.half_written += 1
        written = max(written, latest(run))
        kind = chance.choices(["rank", "torchrun", "launcher"], [8, 1, 1])[0] if others else "rank"
        victims = sorted(pid for pid, what in processes(run).items() if what == kind)
        if not victims:
            kind, victims = "rank", sorted(pid for pid, what in processes(run).items() if what == "rank")
        if victims:
            os.kill(chance.choice(victims), signal.SIGKILL)
            report.kills += 1
            report.while_saving += saving
            report.victims[kind] = report.victims.get(kind, 0) + 1
        if kind == "launcher":
            launcher.wait()
            if left := until(lambda: not processes(run), 60.0) is None and processes(run):
                report.wrong.append(f"kill {number}: orphans {left}")
            launcher = start(folder, "--resume", str(run))
        if written > latest(run):
            report.wrong.append(f"kill {number}: the checkpoint of step {written} is gone, {latest(run)} is the latest")
        say(f"{number + 1} kills ({kind}{', while saving' if saving else ''}), latest checkpoint {latest(run)}")
    last = latest(run)
    until(lambda: latest(run) > last)
    launcher.send_signal(signal.SIGTERM)
    try:
        status = launcher.wait(300)
    except subprocess.TimeoutExpired:
        launcher.kill()
        status = launcher.wait()
    if status != 0:
        report.wrong.append(f"SIGTERM: the launcher ended with {status}")
    if left := until(lambda: not processes(run), 60.0) is None and processes(run):
        report.wrong.append(f"orphans after the end: {left}")
    check(folder, run, report, say)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def check(folder: Path, run: Path, report: Report, say) -> None:
    """Every loss against a run that nobody killed; every start against the checkpoints there were."""
    rows = [e for e in events(run) if e.get("event") == "step"]
    report.steps, report.steps_run = max((e["step"] for e in rows), default=0), len(rows)
    report.starts = sum(e.get("event") == "start" for e in events(run))
    saved = 0
    for e in events(run):
        saved = max(saved, e["step"]) if e.get("event") == "checkpoint" else saved
        if e.get("event") == "start" and e["step"] < saved:
            report.wrong.append(f"a start at step {e['step']} although step {saved} was saved")
        if e.get("event") == "warning" and "jumped" not in e["message"]:
            report.wrong.append(f"damage was found: {e['message']}")
    say(f"the same {report.steps} steps without a kill")
    calm = folder / "calm"
    start(folder, "plan.toml", "-o", str(calm), "--steps", str(report.steps), "--save-every", "0").wait()
    wanted = {e["step"]: e["loss"] for e in events(calm) if e.get("event") == "step"}
    wrong = sorted({e["step"] for e in rows if wanted.get(e["step"]) != e["loss"]})
    if wrong or len(wanted) != report.steps:
        report.wrong.append(f"losses differ at steps {wrong[:10]} ({len(wrong)} of {len(rows)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    where = Path(options.folder or tempfile.mkdtemp(prefix="soak-")).resolve()
    where.mkdir(parents=True, exist_ok=True)
    found = soak(where, options.kills, options.seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(asdict(found), indent=2))
    sys.exit(1 if found.wrong else 0)
