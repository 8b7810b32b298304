"""PyTorch FSDP2: a script on public API, the plan as JSON beside it, the model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ..resolve import Run
from .base import Files, Limit, Options, Target, only, said, whole
from .common import no_axis, options_among, plain_layers, steps, tokens_of
from .environment import settings
from .launch import Program, launched, script
from .rate import rate_of

SCRIPT, PLAN, CONFIG = "train_fsdp.py", "plan.json", "config.json"
TRAINING = (
    "seq_len",
    "global_batch_size",
    "precision",
    "optimizer",
    "optimizer_kernel",
    "master_weights",
    "gradient_dtype",
    "loss",
    "loss_chunks",
)
STRATEGY = (
    "framework", "sharding", "dp", "dp_replicate", "dp_shard", "micro_batch_size", "recompute", "recompute_every", "attention", "offload",
    "reshard_root", "compile", "options",
)  # fmt: skip
# Keys that change the logits after the output projection: a loss in chunks would leave that out.
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
UNTRUSTED = ("auto_map",)


def plan_document(run: Run, options: Options) -> dict[str, Any]:
    """What the script reads: the plan's own words, and what a plan does not hold."""
    filled, rate = run.filled, rate_of(run, options, "constant")
    return {
        "training": {k: filled["training"][k] for k in TRAINING if k in filled["training"]},
        "strategy": {k: filled["strategy"][k] for k in STRATEGY if k in filled["strategy"]},
        "steps": steps(run),
        "learning_rate": options.learning_rate,
        "schedule": rate.shape,
        "warmup_steps": rate.warmup,
        "least_learning_rate": rate.least,
        "clip": options.clip,
        "betas": list(options.betas),
        "weight_decay": options.weight_decay,
        "checkpoint_steps": options.checkpoint_steps,
        "output": options.output,
        "seed": 0,
    }


def program(run: Run, options: Options) -> Program:
    return Program((SCRIPT,), tail=())


def write(run: Run, options: Options) -> Files:
    text = (resources.files(__package__) / "templates" / "train_fsdp.py.txt").read_text(encoding="utf-8")
    config = {k: v for k, v in run.model.config.items() if k not in UNTRUSTED}
    return {
        SCRIPT: text,
        PLAN: json.dumps(plan_document(run, options), indent=2) + "\n",
        CONFIG: json.dumps(config, indent=2, default=list) + "\n",
        "launch.sh": script(run, options, program(run, options), settings(run, TARGET, options)),
    }


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A plan.json with its own script beside it."""
    if SCRIPT not in files:
        return None
    try:
        plan = json.loads(files.get(PLAN, ""))
        training, strategy = dict(plan["training"]), dict(plan["strategy"])
    except (ValueError, KeyError, TypeError):
        return None
    fields: dict[str, Any] = launched(files)
    fields |= {f"training.{k}": training.get(k) for k in TRAINING}
    fields |= {f"strategy.{k}": strategy.get(k) for k in STRATEGY}
    fields["training.tokens"] = tokens_of(
        whole(plan.get("steps")), whole(training.get("global_batch_size")), whole(training.get("seq_len"))
    )
    return said(fields)


def _chunks(run: Run) -> bool:
    return run.job.loss != "chunked" or not any(run.model.config.get(k) for k in SCALED_LOGITS)


LIMITS = (
    only("strategy.framework", ["fsdp2"], "is FSDP2 and nothing else"),
    *no_axis("tp", "pp", "cp", "ep", "etp", "virtual_stages", why="splits parameters and data only (torchtitan has this axis)"),
    only("strategy.sharding", ["zero3", "zero2"], "shards parameters; plain replicas need DDP"),
    only(
        "strategy.offload",
        ["none", "params-cpu", "activations-cpu"],
        "offloads parameters with their optimizer, or activations, to host memory",
    ),
    only("strategy.schedule", ["1f1b"], "has no pipeline"),
    only("strategy.layers_per_stage", [None], "has no pipeline"),
    only("strategy.sequence_parallel", [False], "has no tensor parallelism"),
    only("strategy.recompute_modules", [None], "recomputes whole blocks, or every second product"),
    only("training.precision", ["bf16", "fp16", "fp32"], "multiplies in what torch.matmul takes"),
    only("training.optimizer", ["adamw", "sgd", "sgd_momentum"], "uses the optimizers of torch.optim"),
    only("training.autocast", [False], "casts by MixedPrecisionPolicy"),
    only("training.loss", ["plain", "chunked"], "computes the loss with torch alone"),
    Limit("training.loss", _chunks, "would lose this model's scaled logits with a loss in chunks", lambda run: {"training.loss": "plain"}),
    only("training.method", ["full"], "trains every parameter"),
    only("training.optimizer_in_backward", [False], "steps after backward"),
    only("training.dropout", [0.0], "trains without dropout"),
    only("training.packing", [False], "attends over the whole sequence"),
    only("training.moe_capacity_factor", [None], "drops no token"),
    options_among(("no_sync",), "reads no such option"),
    *plain_layers("runs the modules of transformers as they are"),
)
TARGET = Target(
    name="fsdp",
    title="PyTorch FSDP2 script",
    aliases=("fsdp2",),
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes",
        "cluster.gpus_per_node",
        "training.tokens",
        *(f"training.{k}" for k in TRAINING),
        *(f"strategy.{k}" for k in STRATEGY),
    ),
    leaves=("training.lora_rank", "training.lora_targets", "training.base_quantization", "strategy.cp_kind"),
    install=lambda run, options: "`pip install torch==2.13.0 transformers`",
    command=lambda run, options: "`bash launch.sh`" + (" on every node, HEAD_NODE set to the first" if run.cluster.nodes > 1 else ""),
    program=program,
    source="torch 2.13 torch.distributed.fsdp.fully_shard, torch.utils.checkpoint, torch.distributed.checkpoint",
)
__all__ = ["TARGET", "plan_document"]
