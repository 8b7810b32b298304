"""SkyPilot: ``task.yaml``, the engine's files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import engines
from .base import Files, Limit, Options, Target, said, table, whole
from .environment import settings
from .launch import program_text
from .shell import Raw, command
from .yaml import dump, load

TASK = "task.yaml"
# catalogue id -> SkyPilot's name of the accelerator
ACCELERATORS = {
    "V100-SXM2-16GB": "V100", "V100-SXM2-32GB": "V100-32GB", "T4-16GB": "T4", "A10G-24GB": "A10G", "A10-24GB": "A10", "RTX-A6000-48GB": "RTXA6000",
    "RTX-3090-24GB": "RTX3090", "RTX-4090-24GB": "RTX4090", "RTX-5090-32GB": "RTX5090", "RTX-6000-Ada-48GB": "RTX6000-Ada", "L4-24GB": "L4",
    "L40S-48GB": "L40S", "A100-SXM-40GB": "A100", "A100-PCIe-40GB": "A100", "A100-SXM-80GB": "A100-80GB-SXM", "A100-PCIe-80GB": "A100-80GB",
    "H100-SXM-80GB": "H100-SXM", "H100-PCIe-80GB": "H100", "H200-SXM-141GB": "H200-SXM", "B200-SXM-180GB": "B200", "MI300X": "MI300X",
    "GH200-96GB": "GH200", "Gaudi2": "Gaudi2",
}  # fmt: skip
SETUPS = {
    "fsdp": "pip install torch==2.13.0 transformers",
    "torchtitan": "pip install torchtitan==0.3.0 torchao",
    "deepspeed": "pip install torch deepspeed==0.19.8",
    "trainer": "pip install torch==2.13.0 transformers accelerate deepspeed==0.19.8",
    "megatron": "git clone https://github.com/NVIDIA/Megatron-LM\npip install megatron-core transformer-engine[pytorch]",
}


def task(run: Run, options: Options) -> dict[str, Any]:
    engine = engines.engine_of(run)
    program = engine.program(run, options)  # type: ignore[misc]
    flags: list[tuple[str, object]] = [
        ("--nnodes", Raw('"$SKYPILOT_NUM_NODES"')),
        ("--nproc-per-node", Raw('"$SKYPILOT_NUM_GPUS_PER_NODE"')),
        ("--node-rank", Raw('"$SKYPILOT_NODE_RANK"')),
        ("--master-addr", Raw('"$HEAD_NODE"')),
        ("--master-port", options.port),
    ]
    where = "" if program.here else "cd Megatron-LM\n"
    launch = command(["torchrun"], flags, after=program_text(program))
    return {
        "name": "".join(c if c.isalnum() else "-" for c in options.name.lower() if c.isascii()).strip("-")[:40] or "trainwright",
        "num_nodes": run.cluster.nodes,
        "workdir": ".",
        "resources": {"accelerators": f"{ACCELERATORS[run.cluster.gpu.id]}:{run.cluster.gpus_per_node}", "use_spot": False},
        "envs": {s.name: s.value for s in settings(run, engine, options)},
        "setup": SETUPS[engine.name] + "\n",
        "run": 'HEAD_NODE="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"\n' + where + launch,
    }


def write(run: Run, options: Options) -> Files:
    return {**engines.files(run, options), TASK: dump(task(run, options))}


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A task with accelerators; the engine's files beside it."""
    if TASK not in files:
        return None
    document = load(files[TASK], TASK)
    if not isinstance(document, dict) or "accelerators" not in table(document.get("resources")):
        return None
    kind, _, count = str(document["resources"]["accelerators"]).partition(":")
    nodes, gpus = whole(document.get("num_nodes"), 1), int(count) if count.isdigit() else 1
    _, port, words = str(document.get("run", "")).partition("--master-port")  # what stands before it is the launcher's own
    found = engines.read_launched(files, port + words, nodes, gpus) or {}
    names = [k for k, v in ACCELERATORS.items() if v == kind]
    return found | said({"cluster.gpu": names[0] if names else None, "cluster.nodes": nodes, "cluster.gpus_per_node": gpus})


TARGET = Target(
    name="skypilot",
    title="SkyPilot",
    aliases=("sky",),
    write=write,
    read=read,
    limits=(
        Limit(
            "cluster.gpu",
            lambda run: run.cluster.gpu.id in ACCELERATORS,
            "rents no such accelerator",
            lambda run: {"cluster.gpu": "H100-SXM-80GB"},
        ),
    ),
    says=("cluster.nodes", "cluster.gpus_per_node"),
    leaves=(),
    install=lambda run, options: "`pip install skypilot`",
    command=lambda run, options: f"`sky launch {TASK}`",
    engine=engines.engine_of,
    source="docs.skypilot.co: task YAML, SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK, SKYPILOT_NUM_GPUS_PER_NODE",
)
