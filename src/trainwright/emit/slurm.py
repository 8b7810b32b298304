"""Slurm: ``job.sbatch`` with one srun task a GPU, requeued before its time is over, a checkpoint first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import engines
from .base import Files, Options, Setting, Target
from .environment import settings
from .launch import program_text
from .shell import comment, exports

JOB = "job.sbatch"
NO_SIGNAL = ": # this engine saves at its own interval and knows no signal"
NOTICE_S = 300  # seconds before the limit at which Slurm signals: enough to write a checkpoint
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def directives(run: Run, options: Options) -> str:
    """``#SBATCH`` lines. Slurm reads them by its own rules, not the shell's: the job's name is reduced to plain characters."""
    hours, minutes = divmod(options.minutes, 60)
    lines = [
        f"--job-name={_NAME.sub('-', options.name).strip('-')[:64] or 'trainwright'}",
        f"--nodes={run.cluster.nodes}",
        f"--ntasks-per-node={run.cluster.gpus_per_node}",
        f"--gpus-per-node={run.cluster.gpus_per_node}",
        "--exclusive",
        f"--time={hours:02d}:{minutes:02d}:00",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        f"--signal=B:USR1@{NOTICE_S}",
    ]
    return "".join(f"#SBATCH {line}\n" for line in lines)


BODY = """
HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR="$HEAD_NODE"
export MASTER_PORT={port}

# Slurm signals this script {notice} s before the limit: the ranks are asked to save and end, then the job goes back into the queue.
requeue=0
on_notice() {{
  requeue=1
  {forward}
}}
trap on_notice USR1

# Every task is one rank; the names are those that torchrun would set.
rank_environment='export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"; exec "$@"'
srun --kill-on-bad-exit=1 bash -c "$rank_environment" rank \\
  python {program} &
step=$!
status=0
while kill -0 "$step" 2>/dev/null; do
  status=0
  wait "$step" || status=$?
done
if [ "$requeue" = 1 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def write(run: Run, options: Options) -> Files:
    engine = engines.engine_of(run)
    program = engine.program(run, options)  # type: ignore[misc]
    forward = (
        f'scancel --signal={program.stop_signal} "$SLURM_JOB_ID"'
        if program.stop_signal
        else ": # this engine saves at its own interval and knows no signal"
    )
    body = BODY.format(port=int(options.port), notice=NOTICE_S, forward=forward, program=program_text(program))
    needed = [*settings(run, engine, options), Setting("PYTHONUNBUFFERED", "1", "what a rank printed is in the log when it dies")]
    head = "#!/usr/bin/env bash\n" + directives(run, options) + comment(f"submit it with: sbatch {JOB}")
    text = head + "\nset -euo pipefail\n" + 'cd "$SLURM_SUBMIT_DIR"\n\n' + exports(needed) + body
    return {**engines.files(run, options), JOB: text}


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """The directives up to the first command, and what the engine's part says."""
    text = files.get(JOB, "")
    if "#SBATCH" not in text:
        return None
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)[= ](\S+)", text.split("\nset -")[0], re.MULTILINE))
    nodes, tasks = found.get("nodes", "1"), found.get("ntasks-per-node") or found.get("gpus-per-node", "").rpartition(":")[2]
    cluster = {"nodes": int(nodes) if nodes.isdigit() else None, "gpus_per_node": int(tasks) if tasks.isdigit() else None}
    said = engines.read_launched(files, text[text.find("srun") :], cluster["nodes"], cluster["gpus_per_node"]) or {}
    return said | {"cluster": {k: v for k, v in cluster.items() if v is not None}}


TARGET = Target(
    name="slurm",
    title="Slurm",
    aliases=("sbatch",),
    write=write,
    read=read,
    limits=(),
    says=("cluster.nodes", "cluster.gpus_per_node"),
    leaves=(),
    install=lambda run, options: engines.engine_of(run).install(run, options) + " on every node",
    command=lambda run, options: (
        f"`sbatch {JOB}`" if engines.engine_of(run).name != "megatron" else f"`sbatch {JOB}` in the checkout of Megatron-LM"
    ),
    engine=engines.engine_of,
    source="slurm.schedmd.com/sbatch.html: --signal, --requeue, --open-mode; scancel.html: signals go to job steps, not to the batch script",
)
__all__ = ["TARGET", "directives"]
