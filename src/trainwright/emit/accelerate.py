"""Accelerate: ``accelerate_config.yaml`` for FSDP 1 and 2, DeepSpeed, or DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import deepspeed, trainer
from .base import Files, Limit, Options, Setting, Target, only, said, table, when, whole
from .common import no_axis
from .environment import settings
from .launch import world
from .shell import FROM_HERE, HEAD, Raw, command, exports, quote
from .trainer import FSDP, LOOP_LIMITS, uses
from .yaml import dump, load

CONFIG = "accelerate_config.yaml"
KINDS = {"fsdp1": "FSDP", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED", "ddp": "MULTI_GPU"}
ROTATE = {"allgather": "allgather", "ring": "alltoall"}  # how context parallelism moves keys and values
STRATEGIES = {
    ("zero3", False): "FULL_SHARD",
    ("zero2", False): "SHARD_GRAD_OP",
    ("zero3", True): "HYBRID_SHARD",
    ("zero2", True): "HYBRID_SHARD_ZERO2",
}
PREFIX = "parallelism_config_"


def config(run: Run, options: Options) -> dict[str, Any]:
    """The document, in the keys of accelerate's ClusterConfig."""
    s, job = run.plan.structure, run.job
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": KINDS[s.framework],
        "mixed_precision": {"fp32": "no"}.get(job.precision, job.precision),
        "num_machines": run.cluster.nodes,
        "num_processes": run.cluster.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "debug": False,
    }
    if s.framework == "deepspeed":
        # The JSON holds the batch, the precision and the stages: a key said twice is refused.
        document.pop("mixed_precision")
        inner: dict[str, Any] = {"deepspeed_config_file": deepspeed.CONFIG, "zero3_init_flag": s.sharding == "zero3"}
        if run.cluster.nodes > 1:
            inner["deepspeed_multinode_launcher"] = "standard"
        document["deepspeed_config"] = inner
    elif s.framework in FSDP:
        document["fsdp_config"] = _fsdp(run)
        if s.framework == "fsdp2" and run.plan.dp_shard != run.cluster.gpus:
            document["parallelism_config"] = _degrees(run)  # shards over every rank are FSDP2's own default
    if s.compile:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return document


def _fsdp(run: Run) -> dict[str, Any]:
    s = run.plan.structure
    second = s.framework == "fsdp2"
    common: dict[str, Any] = {
        "fsdp_version": 2 if second else 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": s.sharding == "zero3" if second else STRATEGIES[s.sharding, run.plan.dp_replicate > 1],
        "fsdp_offload_params": s.offload == "params-cpu",
        "fsdp_activation_checkpointing": s.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    if second:
        return common
    return common | {
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
    }


def _degrees(run: Run) -> dict[str, Any]:
    p = run.plan
    degrees: dict[str, Any] = {PREFIX + f"{axis}_size": getattr(p, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
    return degrees | ({PREFIX + "cp_comm_strategy": ROTATE[p.structure.cp_kind]} if p.cp > 1 else {})


def launch(run: Run, options: Options) -> str:
    """``launch.sh``: once, or on every node with its number."""
    flags: list[tuple[str, object]] = [("--config_file", CONFIG)]
    if run.plan.structure.framework == "deepspeed":
        flags.append(("--gradient_accumulation_steps", run.plan.accumulation))  # handed on to DeepSpeed alone
    text = HEAD + FROM_HERE + "\n" + exports(settings(run, TARGET, options))
    if run.cluster.nodes > 1:
        text += '\n: "${HEAD_NODE:?set HEAD_NODE to the address of the first node}" "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"\n'
        flags += [
            ("--machine_rank", Raw('"$NODE_RANK"')),
            ("--main_process_ip", Raw('"$HEAD_NODE"')),
            ("--main_process_port", options.port),
        ]
    return text + "\n" + command(["accelerate launch"], flags, after=quote(options.script))


def accumulation(run: Run) -> list[Setting]:
    """What an Accelerator that is given no other number accumulates."""
    if run.plan.structure.framework == "deepspeed":
        return []
    reason = "micro-batches of a step: with FSDP and DDP `accelerate launch` drops its own --gradient_accumulation_steps"
    return [Setting("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(run.plan.accumulation), reason)]


def write(run: Run, options: Options) -> Files:
    files = {CONFIG: dump(config(run, options)), "launch.sh": launch(run, options)}
    if run.plan.structure.framework == "deepspeed":
        files[deepspeed.CONFIG] = deepspeed.write(run, options)[deepspeed.CONFIG]
    return files


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A ClusterConfig, with the launch line and the DeepSpeed JSON where they are given."""
    if CONFIG not in files:
        return None
    document = load(files[CONFIG], CONFIG)
    if not isinstance(document, dict) or "distributed_type" not in document:
        return None
    base = (deepspeed.read({k: v for k, v in files.items() if k == deepspeed.CONFIG}) or {}) if document.get("deepspeed_config") else {}
    nodes, processes = whole(document.get("num_machines"), 1), whole(document.get("num_processes"))
    fields: dict[str, Any] = {"cluster.nodes": nodes, "cluster.gpus_per_node": processes // nodes if processes and nodes else None}
    fields["strategy.compile"] = bool(table(document.get("dynamo_config")).get("dynamo_backend"))
    kind = document["distributed_type"]
    if kind in ("FSDP", "MULTI_GPU"):
        fields["training.precision"] = "fp32" if document.get("mixed_precision") in ("no", None) else str(document["mixed_precision"])
        fields |= _read_fsdp(document, world(fields)) if kind == "FSDP" else _ddp(world(fields))
    return trainer.merged(base, said(fields))


def _ddp(dp: int | None) -> dict[str, Any]:
    return {
        "strategy.framework": "ddp", "strategy.sharding": "none", "strategy.dp": dp, "strategy.dp_replicate": dp, "strategy.dp_shard": 1,
        "strategy.tp": 1, "strategy.cp": 1, "strategy.offload": "none",
    }  # fmt: skip


def _read_fsdp(document: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    inner = table(document.get("fsdp_config"))
    degrees = table(document.get("parallelism_config"))
    second = inner.get("fsdp_version", 1) == 2
    strategy = inner.get("fsdp_reshard_after_forward", inner.get("fsdp_sharding_strategy", True))
    sharding = "zero3" if strategy not in (False, "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "zero2"
    replicate = whole(degrees.get(PREFIX + "dp_replicate_size"), 1) if second else _replicas(strategy, document)
    tp, cp = whole(degrees.get(PREFIX + "tp_size"), 1), whole(degrees.get(PREFIX + "cp_size"), 1)
    dp = gpus // (tp * cp) if gpus else None
    return {
        "strategy.framework": "fsdp2" if second else "fsdp1",
        "strategy.sharding": sharding,
        "strategy.dp": dp,
        "strategy.dp_replicate": replicate,
        "strategy.dp_shard": dp // replicate if dp else None,
        "strategy.tp": tp,
        "strategy.cp": cp,
        "strategy.cp_kind": {v: k for k, v in ROTATE.items()}.get(str(degrees.get(PREFIX + "cp_comm_strategy"))),
        "strategy.offload": "params-cpu" if inner.get("fsdp_offload_params") else "none",
        "strategy.recompute": "full" if inner.get("fsdp_activation_checkpointing") else "none",
    }


def _replicas(strategy: object, document: dict[str, Any]) -> Any:
    """FSDP1's hybrid strategies shard inside a node and replicate over nodes."""
    return whole(document.get("num_machines"), 1) if str(strategy).startswith("HYBRID") else 1


LIMITS = (
    *LOOP_LIMITS,
    *(when(uses("fsdp1", "deepspeed", "ddp"), limit) for limit in no_axis("tp", "cp", why="has this axis with FSDP2 only")),
    when(lambda run: run.plan.cp > 1, only("strategy.cp_kind", list(ROTATE), "moves keys and values by all-gather or in a ring")),
    Limit(
        "strategy.dp_shard",
        lambda run: run.plan.structure.framework != "fsdp2" or run.plan.dp_shard * run.plan.cp > 1 or run.cluster.gpus == 1,
        "refuses FSDP over one rank",
        lambda run: {"strategy.dp_replicate": 1, "strategy.tp": 1},
    ),
    Limit(
        "strategy.dp_replicate",
        lambda run: run.plan.structure.framework != "fsdp1" or run.plan.dp_replicate in (1, run.cluster.nodes),
        "replicates over nodes or not at all with FSDP1",
        lambda run: {"strategy.dp_replicate": 1},
    ),
)
TARGET = Target(
    name="accelerate",
    title="Accelerate",
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes", "cluster.gpus_per_node", "strategy.framework", "strategy.sharding", "strategy.dp", "strategy.dp_shard", "strategy.dp_replicate",
        "strategy.tp", "strategy.cp", "strategy.compile", "strategy.offload", "training.precision",
    ),
    leaves=(
        "training.seq_len", "training.global_batch_size", "training.tokens", "training.dropout", "training.packing", "training.moe_capacity_factor",
        "training.loss_chunks", "training.autocast", "training.optimizer", "training.optimizer_kernel", "training.method", "training.lora_rank",
        "training.lora_targets", "training.base_quantization", "strategy.micro_batch_size", "strategy.attention", "strategy.reshard_root", "strategy.options",
    ),
    install=lambda run, options: "`pip install torch==2.13.0 accelerate" + (" deepspeed==0.19.8`" if uses("deepspeed")(run) else "`"),
    command=lambda run, options: "`bash launch.sh`" + (" on every node, with HEAD_NODE and NODE_RANK" if run.cluster.nodes > 1 else ""),
    engine=trainer.engine,
    settings=accumulation,
    source="accelerate 1.15 commands/config/config_args.py, commands/launch.py, utils/launch.py, parallelism_config.py",
)  # fmt: skip
