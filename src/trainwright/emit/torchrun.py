"""torchrun: one node, several nodes, elastic; around the files of the engine that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..resolve import Run
from . import engines
from .base import Files, Options, Target
from .environment import settings
from .launch import script


def least_nodes(run: Run) -> int:
    """The fewest nodes on which the model's own degrees, the batch and the memory still work out; those of the plan where none fewer do."""
    from ..cost.estimate import evaluate
    from ..cost.table import PlanTable

    plan, per_node = run.plan, run.cluster.gpus_per_node
    for nodes in range(1, run.cluster.nodes):
        gpus, rest = nodes * per_node, plan.tp * plan.pp * plan.cp
        if gpus % rest:
            continue
        dp = gpus // rest
        if (
            dp % plan.dp_replicate
            or run.job.global_batch_size % (dp * plan.micro_batch_size)
            or (dp * plan.cp * plan.tp) % (plan.ep * plan.etp)
        ):
            continue
        whole = plan.structure.sharding == "none"
        fewer = replace(
            plan,
            dp_replicate=dp if whole else plan.dp_replicate,
            dp_shard=1 if whole else dp // plan.dp_replicate,
            accumulation=run.job.global_batch_size // (dp * plan.micro_batch_size),
        )
        cluster = replace(run.cluster, nodes=nodes)
        if evaluate(run.model, cluster, run.job, PlanTable.from_plans([fewer])).row(0, run.filled).fits:
            return nodes
    return run.cluster.nodes


def write(run: Run, options: Options) -> Files:
    engine = engines.engine_of(run)
    program = engine.program(run, options)  # type: ignore[misc]
    needed = settings(run, engine, options)
    files = {**engines.files(run, options), "launch.sh": script(run, options, program, needed)}
    if run.cluster.nodes > 1:
        files["launch_elastic.sh"] = script(run, options, program, needed, nodes=f"{least_nodes(run)}:{run.cluster.nodes}", restarts=3)
    return files


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A launch script and what its engine's files say."""
    return engines.read(files) if "torchrun" in files.get("launch.sh", "") else None


TARGET = Target(
    name="torchrun",
    title="torchrun",
    aliases=("torch-elastic",),
    write=write,
    read=read,
    limits=(),
    says=("cluster.nodes", "cluster.gpus_per_node"),
    leaves=(),
    install=lambda run, options: engines.engine_of(run).install(run, options),
    command=lambda run, options: (
        "`bash launch.sh`"
        if run.cluster.nodes == 1
        else "`HEAD_NODE=... bash launch.sh` on every node (`launch_elastic.sh` goes on with fewer nodes, from the last checkpoint)"
    ),
    engine=engines.engine_of,
    source="torch 2.13 torch/distributed/run.py",
)
