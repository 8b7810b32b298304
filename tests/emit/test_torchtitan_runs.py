"""Emitted torchtitan sets run on two processes, with the losses of one: `programs/torchtitan_on_cpu.py` stands in for what a CPU has not.

torchtitan wants releases of its own: pip install torch==2.13.0 torchtitan==0.3.0 torchao, then pip install --no-deps triton.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.emit import emit

from .cases import run_of
from .runs import CHOSEN, PROGRAMS, needs, run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTH, BATCH, STEPS, WORDS = 64, 8, 3, 200
# The set's own words, and what a user has to name: data, tokenizer. PyTorch 2.13 shards no parameters that carry spmd_types' annotations.
NAMED = "--dataloader.dataset c4_test --hf-assets-path words --metrics.log-freq 1 --parallelism.spmd-backend partial_dtensor"


def emitted(folder: Path, gpus: int, replicas: int, **strategy: Any) -> None:
    """The set in `folder`, with its data: documents of one sequence each, in the order that gives a step the same ones on any number of replicas, of
    which torchtitan hands each a run of neighbors."""
    training = {"seq_len": LENGTH, "global_batch_size": BATCH, "tokens": STEPS * BATCH * LENGTH, "precision": "fp32"}
    plan = run_of(
        {
            "model": "llama-3.2-1b",
            "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": gpus},
            "training": training,
            "strategy": {"framework": "fsdp2", "micro_batch_size": 2, **strategy},
        }
    )
    options = replace(CHOSEN, learning_rate=3e-3, schedule="constant", warmup_steps=0)
    data = folder / "tests" / "assets" / "c4_test"  # where torchtitan looks for its data set of this name
    data.mkdir(parents=True)
    for name, text in emit(plan, "torchtitan", options).items():
        (folder / name).write_text(text.replace("--dump-folder", f"{NAMED} --dump-folder"))
    shutil.copy(PROGRAMS / "torchtitan_on_cpu.py", folder / "sitecustomize.py")
    share = BATCH // replicas
    order = [step * BATCH + rank * share + i for rank in range(replicas) for step in range(STEPS) for i in range(share)]
    (data / "data.json").write_text("".join(json.dumps({"text": document(i)}) + "\n" for i in order))
    (folder / "words").mkdir()
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(WORDS)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))


def document(number: int) -> str:
    """A sequence and the word behind it: what follows a word is learned from the other sequences."""
    return " ".join(f"w{(number + 3 * i) % WORDS}" for i in range(LENGTH + 1))


def losses(folder: Path) -> list[float]:
    text = re.sub(r"\x1b\[[\d;]*m", "", run(folder, PYTHONPATH=str(folder)))
    found = dict(re.findall(r"step: +(\d+) +loss: +([\d.]+)", text))
    assert list(found) == ["1", "2", "3"]
    return [float(value) for value in found.values()]


@pytest.mark.parametrize(("replicas", "strategy"), [(2, {"sharding": "zero3"}), (1, {"tp": 2})], ids=["fsdp", "tensor-parallel"])
def test_two_processes_have_the_losses_of_one(replicas, strategy, tmp_path: Path):
    """Both begin with torchtitan's own seed checkpoint: the random numbers of a sharded initialization are not those of a whole one."""
    needs("torchtitan", "torchao")
    one, two = tmp_path / "one", tmp_path / "two"
    emitted(one, 1, 1)
    emitted(two, 2, replicas, **strategy)
    script = (one / "launch.sh").read_text()
    (one / "launch.sh").write_text(script.replace("--dump-folder", "--checkpoint.create-seed-checkpoint --dump-folder"))
    run(one, PYTHONPATH=str(one))
    (one / "launch.sh").write_text(script)
    shutil.copytree(one / "outputs" / "checkpoint" / "step-0", two / "outputs" / "checkpoint" / "step-0")
    alone = losses(one)
    assert alone[-1] < alone[0] - 0.1
    assert losses(two) == pytest.approx(alone, abs=2e-5)
