"""Hugging Face Trainer: ``training_args.json`` (read by HfArgumentParser.parse_json_file) with its FSDP or DeepSpeed part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import deepspeed
from .base import Files, Limit, Options, Target, only, said, table, when, whole
from .common import gradient_like, no_axis, plain_layers, steps
from .environment import settings
from .launch import Program, launched, script, world
from .rate import rate_of, trainer_scheduler

ARGUMENTS = "training_args.json"
# transformers.training_args.OptimizerNames
OPTIMIZERS = {
    "adam8bit": "adamw_bnb_8bit",
    "paged_adam8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
}
ADAMW = {"fused": "adamw_torch_fused", "foreach": "adamw_torch"}
FSDP = ("fsdp1", "fsdp2")


def uses(*frameworks: str) -> Any:
    """A condition on the run's framework."""
    return lambda run: run.plan.structure.framework in frameworks


def optimizer_name(run: Run) -> str:
    return ADAMW[run.job.optimizer_kernel] if run.job.optimizer == "adamw" else OPTIMIZERS[run.job.optimizer]


def arguments(run: Run, options: Options) -> dict[str, Any]:
    """Keyword arguments of transformers.TrainingArguments."""
    s, job = run.plan.structure, run.job
    document: dict[str, Any] = {
        "output_dir": options.output,
        "per_device_train_batch_size": run.plan.micro_batch_size,
        "gradient_accumulation_steps": run.plan.accumulation,
        "max_steps": steps(run),
        "learning_rate": options.learning_rate,
        "max_grad_norm": options.clip,
        **trainer_scheduler(rate_of(run, options, "cosine")),
        "weight_decay": options.weight_decay,
        "adam_beta1": options.betas[0],
        "adam_beta2": options.betas[1],
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "optim": optimizer_name(run),
        "torch_compile": s.compile,
        "use_liger_kernel": job.loss == "fused",
        "save_steps": options.checkpoint_steps,
        "logging_steps": 10,
        "dataloader_drop_last": True,
        "report_to": "none",
    }
    if s.framework in FSDP:
        return document | {"fsdp": True, "fsdp_config": _fsdp(run)}
    if s.framework == "deepspeed":
        document["deepspeed"] = deepspeed.CONFIG
    return document | (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}} if s.recompute == "full" else {}
    )


def _fsdp(run: Run) -> dict[str, Any]:
    s = run.plan.structure
    whole = s.sharding == "zero3"
    document: dict[str, Any] = {
        "version": 2 if s.framework == "fsdp2" else 1,
        "reshard_after_forward": whole if s.framework == "fsdp2" else ("full_shard" if whole else "shard_grad_op"),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": s.recompute == "full",
        "cpu_offload": s.offload == "params-cpu",
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return document | ({"backward_prefetch": "BACKWARD_PRE", "use_orig_params": True} if s.framework == "fsdp1" else {})


def program(run: Run, options: Options) -> Program:
    return Program((options.script, ARGUMENTS), stop_signal="TERM")


def write(run: Run, options: Options) -> Files:
    files = {ARGUMENTS: json.dumps(arguments(run, options), indent=2) + "\n"}
    if run.plan.structure.framework == "deepspeed":
        files[deepspeed.CONFIG] = deepspeed.write(run, options)[deepspeed.CONFIG]
    return {**files, "launch.sh": script(run, options, program(run, options), settings(run, TARGET, options))}


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """Training arguments: known by their batch key."""
    try:
        document = json.loads(files.get(ARGUMENTS, ""))
    except ValueError:
        return None
    if not isinstance(document, dict) or "per_device_train_batch_size" not in document:
        return None
    base = deepspeed.read(files) if document.get("deepspeed") == deepspeed.CONFIG else None
    fields = _fields(document, launched(files), base is not None)
    return merged(base or {}, said(fields))


def _fields(document: dict[str, Any], fields: dict[str, Any], on_deepspeed: bool) -> dict[str, Any]:
    micro, accumulation = whole(document["per_device_train_batch_size"]), whole(document.get("gradient_accumulation_steps", 1))
    dp = world(fields)
    kernel = {v: k for k, v in ADAMW.items()}.get(str(document.get("optim")))
    fields |= {
        "strategy.micro_batch_size": micro,
        "strategy.dp": dp,
        "strategy.compile": document.get("torch_compile") is True,
        "training.global_batch_size": micro * accumulation * dp if dp and micro and accumulation else None,
        "training.precision": next((p for p in ("bf16", "fp16") if document.get(p) is True), "fp32"),
        "training.optimizer": "adamw" if kernel else {v: k for k, v in OPTIMIZERS.items()}.get(str(document.get("optim"))),
        "training.optimizer_kernel": kernel,
        "training.loss": "fused" if document.get("use_liger_kernel") else "plain",
        "strategy.recompute": "full" if document.get("gradient_checkpointing") else "none",
    }
    if document.get("fsdp"):
        fields |= _read_fsdp(table(document.get("fsdp_config")), dp)
    elif not on_deepspeed:
        fields |= {
            "strategy.framework": "ddp",
            "strategy.sharding": "none",
            "strategy.dp_shard": 1,
            "strategy.dp_replicate": dp,
            "strategy.offload": "none",
        }
    return fields


def _read_fsdp(config: dict[str, Any], dp: int | None) -> dict[str, Any]:
    version = 1 if config.get("version") == 1 else 2
    return {
        "strategy.framework": f"fsdp{version}",
        "strategy.sharding": "zero3" if config.get("reshard_after_forward") not in (False, "shard_grad_op") else "zero2",
        "strategy.dp_shard": dp,
        "strategy.dp_replicate": 1,
        "strategy.recompute": "full" if config.get("activation_checkpointing") else "none",
        "strategy.offload": "params-cpu" if config.get("cpu_offload") else "none",
    }


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two partial run specs; the second wins."""
    return {k: {**first.get(k, {}), **second.get(k, {})} for k in [*first, *(k for k in second if k not in first)]}


def engine(run: Run) -> Target | None:
    """On DeepSpeed, its own JSON."""
    return deepspeed.TARGET if run.plan.structure.framework == "deepspeed" else None


LOOP_LIMITS = (
    only("strategy.framework", ["fsdp2", "deepspeed", "fsdp1", "ddp"], "runs on FSDP, DeepSpeed or DDP"),
    when(uses(*FSDP), only("strategy.sharding", ["zero3", "zero2"], "shards parameters with FSDP")),
    when(uses("ddp"), only("strategy.sharding", ["none"], "keeps whole optimizer states on DDP")),
    when(uses(*FSDP), only("strategy.offload", ["none", "params-cpu"], "offloads parameters and their optimizer together")),
    when(uses("ddp"), only("strategy.offload", ["none"], "offloads nothing on DDP")),
    only("training.precision", ["bf16", "fp16", "fp32"], "has no key for this format"),
    Limit(
        "training.gradient_dtype",
        lambda run: run.plan.structure.framework not in FSDP or run.job.gradient_dtype == gradient_like(run),
        "reduces gradients in the type of the products (accelerate's FSDP plugin)",
        lambda run: {"training.gradient_dtype": gradient_like(run)},
    ),
    when(uses("ddp"), only("training.gradient_dtype", ["fp32"], "keeps fp32 gradients of fp32 parameters on DDP")),
    when(
        lambda run: run.plan.structure.framework == "ddp" and run.job.precision != "fp32",
        only("training.autocast", [True], "computes in 16 bits by torch.autocast on DDP"),
    ),
    Limit(
        "training.master_weights",
        lambda run: run.job.precision == "fp32" or run.job.master_weights == "fp32",
        "keeps parameters in fp32",
        lambda run: {"training.master_weights": "fp32"},
    ),
    only("strategy.recompute", ["none", "full"], "recomputes whole blocks or nothing"),
    only("strategy.recompute_every", [1], "recomputes every block"),
    only("strategy.recompute_modules", [None], "recomputes whole blocks"),
    only("training.loss", ["plain", "fused"], "takes the loss of transformers, or Liger's fused one"),
    only("training.optimizer_in_backward", [False], "steps after backward"),
    *no_axis("pp", "ep", "etp", "virtual_stages", why="has no such axis"),
    only("strategy.schedule", ["1f1b"], "has no pipeline"),
    only("strategy.layers_per_stage", [None], "has no pipeline"),
    only("strategy.sequence_parallel", [False], "has no sequence parallelism beside tensor parallelism"),
    *plain_layers("runs the modules of transformers as they are"),
)
LIMITS = (
    *LOOP_LIMITS,
    *no_axis("tp", "cp", why="splits parameters and data only"),
    Limit(
        "strategy.dp_replicate",
        lambda run: run.plan.structure.sharding == "none" or run.plan.dp_replicate == 1,
        "shards over all ranks",
        lambda run: {"strategy.dp_replicate": 1},
    ),
    only("training.optimizer", ["adamw", *OPTIMIZERS], "has no such optimizer"),
    when(
        lambda run: run.job.optimizer == "adamw",
        only("training.optimizer_kernel", list(ADAMW), "steps with PyTorch's fused or foreach kernels"),
    ),
)
TARGET = Target(
    name="trainer",
    title="Hugging Face Trainer",
    aliases=("hf", "transformers", "huggingface"),
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes", "cluster.gpus_per_node",
        "strategy.framework", "strategy.sharding", "strategy.dp", "strategy.dp_shard", "strategy.dp_replicate", "strategy.micro_batch_size", "strategy.compile",
        "strategy.recompute", "strategy.offload",
        "training.global_batch_size", "training.precision", "training.optimizer", "training.optimizer_kernel", "training.loss",
    ),
    leaves=(
        "training.seq_len", "training.tokens", "training.dropout", "training.packing", "training.moe_capacity_factor", "training.loss_chunks",
        "training.autocast",
        "training.method", "training.lora_rank", "training.lora_targets", "training.base_quantization", "strategy.attention", "strategy.reshard_root",
        "strategy.cp_kind", "strategy.options",
    ),
    install=lambda run, options: "`pip install torch==2.13.0 transformers accelerate" + (" deepspeed==0.19.8`" if uses("deepspeed")(run) else "`"),
    command=lambda run, options: "`bash launch.sh`" + (" on every node, HEAD_NODE set to the first" if run.cluster.nodes > 1 else ""),
    program=program,
    engine=engine,
    source="transformers 5.24 training_args.py, accelerate 1.15 utils/dataclasses.py",
)  # fmt: skip
