"""Emitted sets run as they stand: two processes, three steps, on CPU, with the losses of one process.

Each engine needs its package and says so where it is absent: pip install -c constraints.txt '.[dev,engines]' && pytest -m slow tests/emit/test_real_runs.py
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.emit import Options, emit

from .cases import run_of
from .runs import CHOSEN, LIMIT_S, PROGRAMS, end, needs, run, started

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def tiny() -> Any:
    """The module that the programs import, imported here."""
    spec = importlib.util.spec_from_file_location("tiny", PROGRAMS / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emitted(
    folder: Path, target: str, program: str, strategy: dict[str, Any], nodes: int = 1, options: Options = CHOSEN, **training: Any
) -> dict[str, str]:
    """The set of a plan for two GPUs in `folder`, with the user's program and what it imports; the set's files."""
    small = tiny()
    whole = {
        "seq_len": small.LENGTH,
        "global_batch_size": small.BATCH,
        "tokens": small.STEPS * small.BATCH * small.LENGTH,
        "precision": "fp32",
    }
    run = run_of(
        {
            "model": {"model_type": "llama", **small.CONFIG},
            "cluster": {"gpu": "h100", "nodes": nodes, "gpus_per_node": 2 // nodes},
            "training": whole | training,
            "strategy": {"micro_batch_size": 2, **strategy},
        }
    )
    files = emit(run, target, options)
    for name, text in files.items():
        (folder / name).write_text(text)
    if program:
        (folder / "train.py").write_text((PROGRAMS / program).read_text())
    (folder / "tiny.py").write_text((PROGRAMS / "tiny.py").read_text())
    chosen = {"lr": CHOSEN.learning_rate, "betas": CHOSEN.betas, "weight_decay": CHOSEN.weight_decay, "clip": CHOSEN.clip, "micro": 2}
    (folder / "options.json").write_text(json.dumps(chosen))
    return files


def without_compiled_kernels(folder: Path) -> None:
    """DeepSpeed compiles its own AdamW on first use, minutes on a CPU: torch's does the same arithmetic."""
    path = folder / "ds_config.json"
    document = json.loads(path.read_text())
    document["optimizer"]["params"]["torch_adam"] = True
    path.write_text(json.dumps(document))


def losses(text: str) -> list[float]:
    """As printed, wherever a progress bar left the cursor."""
    return [float(value) for value in re.findall(r"step \d+ loss ([\d.]+)", text)]


def alone(cosine: bool = False, decays_norms: bool = True) -> list[float]:
    return tiny().alone(CHOSEN.learning_rate, CHOSEN.betas, CHOSEN.weight_decay, CHOSEN.clip, cosine, decays_norms)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_deepspeed(sharding, tmp_path: Path):
    needs("deepspeed", "transformers")
    emitted(tmp_path, "deepspeed", "on_deepspeed.py", {"framework": "deepspeed", "sharding": sharding})
    without_compiled_kernels(tmp_path)
    text = run(tmp_path)
    assert f"stage {sharding[-1]} " in text
    assert losses(text) == pytest.approx(alone(), abs=2e-6)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_accelerate_fsdp2(sharding, tmp_path: Path):
    needs("accelerate", "transformers")
    emitted(tmp_path, "accelerate", "on_accelerate.py", {"framework": "fsdp2", "sharding": sharding})
    text = run(tmp_path)
    assert "type FSDP model FSDPLlamaForCausalLM" in text
    assert losses(text) == pytest.approx(alone(), abs=2e-6)


def test_accelerate_with_recomputation(tmp_path: Path):
    """Shards over every rank need no degrees in the file."""
    needs("accelerate", "transformers")
    files = emitted(tmp_path, "accelerate", "on_accelerate.py", {"framework": "fsdp2", "recompute": "full"})
    assert "parallelism_config" not in files["accelerate_config.yaml"]
    assert losses(run(tmp_path)) == pytest.approx(alone(), abs=2e-6)


def test_accelerate_ddp(tmp_path: Path):
    """Plain replicas accumulate as well: the number that `accelerate launch` hands on to DeepSpeed only."""
    needs("accelerate", "transformers")
    emitted(tmp_path, "accelerate", "on_accelerate.py", {"framework": "ddp"})
    text = run(tmp_path, "ddp")
    assert "type MULTI_CPU model DistributedDataParallel" in text
    assert losses(text) == pytest.approx(alone(), abs=2e-6)


def test_accelerate_deepspeed(tmp_path: Path):
    needs("accelerate", "deepspeed", "transformers")
    emitted(tmp_path, "accelerate", "on_accelerate.py", {"framework": "deepspeed", "sharding": "zero3"})
    without_compiled_kernels(tmp_path)
    text = run(tmp_path, "deepspeed")
    assert "type DEEPSPEED model DeepSpeedEngine" in text
    assert losses(text) == pytest.approx(alone(), abs=2e-6)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({"framework": "fsdp2", "sharding": "zero3"}, "type FSDP"),
        ({"framework": "deepspeed", "sharding": "zero2"}, "type DEEPSPEED"),
        ({"framework": "ddp"}, "type MULTI_CPU model DistributedDataParallel"),
    ],
    ids=["fsdp2", "deepspeed", "ddp"],
)
def test_trainer(strategy, kind, tmp_path: Path):
    """The Trainer's own optimizer leaves norms out of weight decay; DeepSpeed's takes every parameter. The schedule is the Trainer's with both."""
    needs("accelerate", "transformers", *(["deepspeed"] if strategy["framework"] == "deepspeed" else []))
    emitted(tmp_path, "trainer", "on_trainer.py", strategy)
    if strategy["framework"] == "deepspeed":
        without_compiled_kernels(tmp_path)
    text = run(tmp_path, strategy["framework"])
    assert kind in text
    assert losses(text) == pytest.approx(alone(cosine=True, decays_norms=strategy["framework"] == "deepspeed"), abs=2e-6)


def meeting() -> Options:
    """The options of several nodes, with a port that nothing else on this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return replace(CHOSEN, port=probe.getsockname()[1])


def alone_on_script(folder: Path) -> list[float]:
    """The losses of the FSDP2 script itself in one process: it makes its own tokens."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train_fsdp.py", "--output", "alone"]
    with started(words, folder, NODE="alone") as process:
        process.wait(LIMIT_S)
    return losses((folder / "log-alone.txt").read_text())


def node(folder: Path, number: int, script: str) -> Any:
    """One of two "nodes" that meet on this machine: each runs the set's script, as on nodes of a cluster."""
    return started(["bash", script], folder, NODE=str(number), HEAD_NODE="127.0.0.1")


def test_torchrun_on_two_nodes(tmp_path: Path):
    """Two agents of one process each meet at HEAD_NODE and train as one process does."""
    needs("transformers")
    emitted(tmp_path, "torchrun", "", {"framework": "fsdp2"}, nodes=2, options=meeting())
    with node(tmp_path, 0, "launch.sh") as first, node(tmp_path, 1, "launch.sh") as second:
        first.wait(LIMIT_S)
        second.wait(60)
        text = "".join((tmp_path / f"log-{i}.txt").read_text() for i in (0, 1))
    assert (first.returncode, second.returncode) == (0, 0), text[-3000:]
    assert losses(text) == pytest.approx(alone_on_script(tmp_path), abs=2e-6)


def test_torchrun_elastic_goes_on_with_one_node_when_the_other_is_gone(tmp_path: Path):
    """The second "node" is killed after a checkpoint; the first starts anew alone, from the checkpoint, and the losses stay those of one process."""
    needs("transformers")
    slow = replace(meeting(), checkpoint_steps=1)
    files = emitted(tmp_path, "torchrun", "", {"framework": "fsdp2"}, nodes=2, options=slow, tokens=8 * 8 * 32)
    assert "--nnodes 1:2" in files["launch_elastic.sh"]
    reference = alone_on_script(tmp_path)
    with node(tmp_path, 0, "launch_elastic.sh") as first, node(tmp_path, 1, "launch_elastic.sh") as second:
        saved = tmp_path / "outputs"
        until = time.monotonic() + LIMIT_S
        while not list(saved.glob("step-2/.metadata")) and time.monotonic() < until and first.poll() is None:
            time.sleep(0.05)
        end(tmp_path, "1")
        second.wait(LIMIT_S)
        first.wait(LIMIT_S)
        text = (tmp_path / "log-0.txt").read_text()
    assert first.returncode == 0, text[-3000:]
    steps = {int(line.split()[1]): float(line.split()[3]) for line in text.splitlines() if line.startswith("step ")}
    assert max(steps) == 8
    assert list(saved.glob("step-8/.metadata"))
    assert [steps[i] for i in sorted(steps)] == pytest.approx([reference[i - 1] for i in sorted(steps)], abs=2e-6)
