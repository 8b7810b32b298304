"""Megatron-LM: the arguments of pretrain_gpt.py in a launch script and, the same, as the YAML of its own test runner (ENV_VARS, MODEL_ARGS).

The experimental ``--yaml-cfg`` is left alone: it switches the argument parser off, defaults and validation with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..cost.stages import layers_per_stage
from ..frameworks import FRAMEWORKS
from ..resolve import Run
from .base import Files, Limit, Options, Target, only, said, when
from .common import no_axis, nothing_but_full_precision, options_among, steps, tokens_of
from .environment import one_connection, settings
from .launch import Flags, Program, launched, script, world
from .megatron_model import FAMILIES, architecture
from .rate import rate_of
from .shell import flags_of, number
from .yaml import dump

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "sgd_momentum": "sgd", "lion": "lion", "muon": "muon"}
ATTENTION = {"flash": "flash", "efficient": "fused", "eager": "unfused"}
CP_KINDS = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts")


def layout(run: Run) -> list[int] | None:
    """Layers of each stage where Megatron's own even split is not the plan's; None where it is."""
    plan = run.plan
    stages = plan.pp * plan.virtual_stages
    counts = layers_per_stage(run.model.num_layers, stages, plan.structure.layers_per_stage, FRAMEWORKS["megatron"].even_stages)
    return None if len(set(counts)) == 1 else counts


def layout_text(counts: list[int]) -> str:
    """``Etttt|ttttt|tttL``: embedding, decoder layers, loss, a bar between stages."""
    stages = ["t" * n for n in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def parallelism(run: Run) -> Flags:
    p, s = run.plan, run.plan.structure
    flags: Flags = [
        ("--tensor-model-parallel-size", p.tp),
        ("--pipeline-model-parallel-size", p.pp),
        ("--context-parallel-size", p.cp),
        ("--micro-batch-size", p.micro_batch_size),
        ("--global-batch-size", run.job.global_batch_size),
    ]
    counts = layout(run)
    if counts is not None:
        flags.append(("--pipeline-model-parallel-layout", layout_text(counts)))
    if p.virtual_stages > 1 and counts is None:
        flags.append(("--num-virtual-stages-per-pipeline-rank", p.virtual_stages))
    if p.cp > 1:
        flags.append(("--cp-comm-type", CP_KINDS[s.cp_kind]))
    if run.model.is_moe:
        flags += [("--expert-model-parallel-size", p.ep), ("--expert-tensor-parallel-size", p.etp)]
    if s.sequence_parallel:
        flags.append(("--sequence-parallel", True))
    if s.async_tp:
        flags.append(("--tp-comm-overlap", True))
    if s.sharding == "zero1":
        flags.append(("--use-distributed-optimizer", True))
        if p.dp_replicate > 1:
            flags.append(("--num-distributed-optimizer-instances", p.dp_replicate))
    return flags + _overlap(run)


def _overlap(run: Run) -> Flags:
    """Gradients and parameters travel behind backward and forward: what the time of the plan assumes of releases since mid-2023."""
    s = run.plan.structure
    options = dict(s.options)
    hides = options.get("overlap_grad_reduce", (s.framework_date or "2024-01") >= "2023-06")
    flags: Flags = [("--overlap-grad-reduce", True)] if hides else []
    if s.sharding == "zero1" and options.get("overlap_param_gather", hides):
        flags.append(("--overlap-param-gather", True))
    return flags


# Options that are flags of their own: types of the optimizer's states, overlap of the experts' traffic.
KNOBS = {
    "main_grads_dtype": "--main-grads-dtype",
    "main_params_dtype": "--main-params-dtype",
    "exp_avg_dtype": "--exp-avg-dtype",
    "exp_avg_sq_dtype": "--exp-avg-sq-dtype",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
}
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def knobs(run: Run) -> Flags:
    flags: Flags = []
    for name, value in run.plan.structure.options:
        if name in KNOBS and value is not False:
            flags.append((KNOBS[name], value))
    if any(name.endswith("_dtype") for name, _ in run.plan.structure.options) and run.plan.structure.offload != "optimizer-cpu":
        flags.append(("--use-precision-aware-optimizer", True))
    return flags


def memory(run: Run) -> Flags:
    s = run.plan.structure
    flags: Flags = []
    if s.recompute == "full":
        flags += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", s.recompute_every)]
    elif s.recompute == "selective":
        flags += [("--recompute-granularity", "selective"), ("--recompute-modules", list(s.recompute_modules or ("core_attn",)))]
    if s.offload == "optimizer-cpu":
        flags += [("--optimizer-cpu-offload", True), ("--optimizer-offload-fraction", 1.0), ("--use-precision-aware-optimizer", True)]
    elif s.offload == "activations-cpu":
        flags.append(("--cpu-offloading-num-layers", run.model.num_layers - 1))
    if s.cuda_graphs:
        flags.append(("--cuda-graph-impl", "local"))
    return flags


def numbers(run: Run) -> Flags:
    """Formats, attention, loss, dropout."""
    job, s = run.job, run.plan.structure
    flags: Flags = [("--attention-backend", ATTENTION[s.attention]), ("--transformer-impl", "transformer_engine")]
    if job.precision != "fp32":
        flags.append(("--fp16" if job.precision == "fp16" else "--bf16", True))
    if job.precision == "fp8":
        flags += [("--fp8-format", "hybrid"), ("--fp8-recipe", recipe(run))]
        flags += [("--fp8-param-gather", True)] if s.fp8_params else []
    flags.append(("--accumulate-allreduce-grads-in-fp32", True) if job.gradient_dtype == "fp32" else ("--grad-reduce-in-bf16", True))
    if job.loss == "fused":
        flags += [("--cross-entropy-loss-fusion", True), ("--cross-entropy-fusion-impl", "native")]
    return [*flags, ("--attention-dropout", job.dropout), ("--hidden-dropout", job.dropout)]


def recipe(run: Run) -> str:
    return run.job.fp8_recipe or FRAMEWORKS["megatron"].time.default_fp8_recipe


def training(run: Run, options: Options) -> Flags:
    """The loop: steps, optimizer, checkpoints. Data is mocked until paths are given."""
    rate = rate_of(run, options, "cosine", max(1, min(2000, steps(run) // 100)), float(f"{options.learning_rate / 10:.6g}"))
    flags: Flags = [
        ("--train-iters", steps(run)),
        ("--optimizer", OPTIMIZERS[run.job.optimizer]),
        ("--lr", options.learning_rate),
        ("--min-lr", rate.least),
        ("--lr-decay-style", rate.shape),
        ("--lr-warmup-iters", rate.warmup),
        ("--weight-decay", options.weight_decay),
        ("--clip-grad", options.clip),
        ("--mock-data", True),
        ("--split", "99,1,0"),
        ("--save", options.output),
        ("--load", options.output),
        ("--save-interval", options.checkpoint_steps),
        ("--ckpt-format", "torch_dist"),
        ("--exit-signal-handler", True),
        ("--log-interval", 10),
        ("--log-throughput", True),
        ("--eval-iters", 0),
        ("--distributed-timeout-minutes", 30),
    ]
    if run.job.optimizer in ("sgd", "sgd_momentum"):
        flags.append(("--sgd-momentum", 0.9 if run.job.optimizer == "sgd_momentum" else 0.0))
    if run.job.optimizer == "adamw":
        flags += [("--adam-beta1", options.betas[0]), ("--adam-beta2", options.betas[1])]
    return flags


def arguments(run: Run, options: Options) -> Flags:
    return [*architecture(run), *parallelism(run), *knobs(run), *memory(run), *numbers(run), *training(run, options)]


def program(run: Run, options: Options) -> Program:
    return Program(("pretrain_gpt.py",), tuple(arguments(run, options)), here=False, stop_signal="TERM")


def write(run: Run, options: Options) -> Files:
    needed = settings(run, TARGET, options)
    document = {"ENV_VARS": {s.name: s.value for s in needed}, "MODEL_ARGS": dict(arguments(run, options))}
    return {
        "megatron.yaml": dump(document),
        "launch.sh": script(run, options, program(run, options), needed),
    }


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A script that starts pretrain_gpt.py, by its flags."""
    for name in ("launch.sh", "job.sbatch"):
        if "pretrain_gpt.py" in files.get(name, ""):
            return said(_fields(flags_of(files[name]), launched(files)))
    return None


def _fields(flags: dict[str, list[str]], fields: dict[str, Any]) -> dict[str, Any]:
    degrees = {
        axis: number(flags, f"--{word}-parallel-size") or 1
        for axis, word in (
            ("tp", "tensor-model"),
            ("pp", "pipeline-model"),
            ("cp", "context"),
            ("ep", "expert-model"),
            ("etp", "expert-tensor"),
        )
    }
    gpus = world(fields)
    dp = gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"]) if gpus else None
    sharding = "zero1" if "--use-distributed-optimizer" in flags else "none"
    replicate = dp if sharding == "none" else number(flags, "--num-distributed-optimizer-instances") or 1
    counts = _read_layout(flags)
    chunks = number(flags, "--num-virtual-stages-per-pipeline-rank") or (len(counts) // degrees["pp"] if counts else 1)
    batch, seq_len = number(flags, "--global-batch-size"), number(flags, "--seq-length")
    fields |= {f"strategy.{axis}": size for axis, size in degrees.items()}
    options: dict[str, Any] = {k: f"--{k.replace('_', '-')}" in flags for k in OVERLAPS}
    options |= {k: flags[flag][0] if flags[flag] else True for k, flag in KNOBS.items() if flag in flags}
    return fields | _read_numbers(flags) | _read_memory(flags) | {
        "strategy.framework": "megatron",
        "strategy.options": options,
        "strategy.sharding": sharding,
        "strategy.dp": dp,
        "strategy.dp_replicate": replicate,
        "strategy.dp_shard": dp // replicate if dp and replicate else None,
        "strategy.cp_kind": {v: k for k, v in CP_KINDS.items()}.get(_first(flags, "--cp-comm-type")),
        "strategy.sequence_parallel": "--sequence-parallel" in flags,
        "strategy.async_tp": "--tp-comm-overlap" in flags,
        "strategy.virtual_stages": chunks,
        "strategy.schedule": "interleaved-1f1b" if chunks > 1 else "1f1b",
        "strategy.layers_per_stage": counts,
        "strategy.micro_batch_size": number(flags, "--micro-batch-size"),
        "training.global_batch_size": batch,
        "training.seq_len": seq_len,
        "training.tokens": tokens_of(number(flags, "--train-iters"), batch, seq_len),
    }  # fmt: skip


def _first(flags: dict[str, list[str]], flag: str) -> str:
    return (flags.get(flag) or [""])[0]


def _read_layout(flags: dict[str, list[str]]) -> list[int] | None:
    text = _first(flags, "--pipeline-model-parallel-layout")
    return [stage.count("t") for stage in text.split("|")] if re.fullmatch(r"[EtmL|]+", text) else None


def _read_numbers(flags: dict[str, list[str]]) -> dict[str, Any]:
    precision = "fp8" if "--fp8-format" in flags else next((p for p in ("bf16", "fp16") if f"--{p}" in flags), "fp32")
    optimizer = {v: k for k, v in OPTIMIZERS.items() if k != "sgd"}.get(_first(flags, "--optimizer") or "adam")
    if optimizer == "sgd_momentum" and float(_first(flags, "--sgd-momentum") or 0.9) == 0:
        optimizer = "sgd"
    dropout, capacity = _first(flags, "--hidden-dropout"), _first(flags, "--moe-expert-capacity-factor")
    return {
        "training.precision": precision,
        "training.fp8_recipe": _first(flags, "--fp8-recipe") or None,
        "training.gradient_dtype": "bf16" if "--grad-reduce-in-bf16" in flags else "fp32",
        "training.optimizer": optimizer,
        "training.loss": "fused" if "--cross-entropy-loss-fusion" in flags else "vocab-parallel",
        "training.dropout": float(dropout) if dropout else None,
        "training.moe_capacity_factor": float(capacity) if capacity else None,
        "strategy.attention": {v: k for k, v in ATTENTION.items()}.get(_first(flags, "--attention-backend")),
        "strategy.fp8_params": "--fp8-param-gather" in flags,
    }


def _read_memory(flags: dict[str, list[str]]) -> dict[str, Any]:
    granularity = _first(flags, "--recompute-granularity") or "none"
    modules = [m for m in flags.get("--recompute-modules", []) if m in MODULES]
    offload = (
        "optimizer-cpu"
        if "--optimizer-cpu-offload" in flags
        else "activations-cpu"
        if number(flags, "--cpu-offloading-num-layers")
        else "none"
    )
    return {
        "strategy.recompute": granularity,
        "strategy.recompute_every": number(flags, "--recompute-num-layers") if granularity == "full" else 1,
        "strategy.recompute_modules": modules or None,
        "strategy.offload": offload,
        "strategy.cuda_graphs": "--cuda-graph-impl" in flags,
    }


LIMITS = (
    only("strategy.framework", ["megatron"], "is Megatron-Core and nothing else"),
    Limit(
        "model", lambda run: run.model.model_type in FAMILIES, "builds other families only in code (llama, mistral, qwen, mixtral, deepseek and gpt2 by flags)",
        lambda run: {"model": f"{max(1, round(run.model.parameters / 1e9))}B"},
    ),
    only("strategy.schedule", ["1f1b", "interleaved-1f1b"], "runs 1F1B, interleaved with virtual stages"),
    when(lambda run: run.plan.virtual_stages > 1, only("strategy.schedule", ["interleaved-1f1b"], "interleaves virtual stages")),
    when(lambda run: run.plan.virtual_stages == 1, only("strategy.schedule", ["1f1b"], "has no interleaving without virtual stages")),
    when(lambda run: not run.model.is_moe, no_axis("ep", "etp", why="has experts only in models that have them")[0]),
    when(lambda run: not run.model.is_moe, no_axis("etp", why="has experts only in models that have them")[0]),
    Limit(
        "strategy.sequence_parallel", lambda run: run.plan.structure.sequence_parallel or not run.model.is_moe or run.plan.tp == 1,
        "demands sequence parallelism with experts and tensor parallelism", lambda run: {"strategy.sequence_parallel": True},
    ),
    when(lambda run: run.plan.structure.async_tp, only("strategy.sequence_parallel", [True], "overlaps the gathers of sequence parallelism")),
    only("strategy.attention", list(ATTENTION), "has flash, fused and unfused attention"),
    only("training.precision", ["bf16", "fp16", "fp32", "fp8"], "is given no recipe for this format here"),
    when(lambda run: run.job.precision == "fp8", only("training.fp8_recipe", [None, *RECIPES], "has no such recipe")),
    when(lambda run: run.job.precision != "fp8", only("training.fp8_recipe", [None], "needs fp8 for a recipe")),
    when(lambda run: run.job.precision != "fp8", only("strategy.fp8_params", [False], "keeps fp8 parameters in fp8 only")),
    when(lambda run: run.job.precision in ("fp32", "fp16"), only("training.gradient_dtype", ["fp32"], "reduces 16-bit gradients with bf16 only")),
    only("training.gradient_dtype", ["fp32", "bf16"], "reduces in fp32 or bf16"),
    nothing_but_full_precision("keeps fp32 masters"),
    only("training.optimizer", list(OPTIMIZERS), "has no such optimizer"),
    only("training.optimizer_kernel", ["fused"], "steps with fused kernels"),
    only("training.autocast", [False], "casts the weights itself"),
    only("training.packing", [False], "packs samples only in fine-tuning"),
    only("training.optimizer_in_backward", [False], "steps after backward"),
    only("training.loss", ["vocab-parallel", "fused"], "splits the loss over the vocabulary"),
    only("training.method", ["full"], "trains every parameter"),
    only("strategy.compile", [False], "fuses by kernels of its own"),
    when(
        lambda run: run.plan.structure.offload == "activations-cpu",
        Limit("strategy.pp", lambda run: run.plan.pp == 1, "offloads activations without a pipeline only", lambda run: {"strategy.offload": "none"}),
    ),
    when(lambda run: run.plan.structure.offload == "activations-cpu", only("strategy.recompute", ["none"], "offloads activations or recomputes them")),
    when(lambda run: run.plan.structure.offload == "optimizer-cpu", only("strategy.sharding", ["zero1"], "offloads the distributed optimizer")),
    only("strategy.offload", ["none", "optimizer-cpu", "activations-cpu"], "has no such offload"),
    when(
        lambda run: any(name.endswith("_dtype") for name, _ in run.plan.structure.options),
        only("strategy.sharding", ["zero1"], "has other types of optimizer states in the distributed optimizer only"),
    ),
    options_among((*KNOBS, *OVERLAPS), "is given no such option here"),
)  # fmt: skip
TARGET = Target(
    name="megatron",
    title="Megatron-LM",
    aliases=("megatron-lm", "megatron-core"),
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes", "cluster.gpus_per_node",
        *(f"strategy.{k}" for k in (
            "framework", "sharding", "dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "sequence_parallel", "async_tp", "virtual_stages",
            "schedule", "micro_batch_size", "recompute", "recompute_every", "recompute_modules", "attention", "offload", "cuda_graphs", "fp8_params", "options",
        )),
        *(f"training.{k}" for k in (
            "seq_len", "global_batch_size", "tokens", "precision", "gradient_dtype", "optimizer", "loss", "dropout", "moe_capacity_factor",
        )),
    ),
    leaves=(
        "training.loss_chunks", "training.lora_rank", "training.lora_targets", "training.base_quantization", "strategy.reshard_root",
        "strategy.cp_kind", "strategy.layers_per_stage", "training.fp8_recipe",
    ),
    install=lambda run, options: "`git clone https://github.com/NVIDIA/Megatron-LM` in NVIDIA's PyTorch container",
    command=lambda run, options: "`bash launch.sh` in the checkout" + (" on every node, HEAD_NODE set to the first" if run.cluster.nodes > 1 else ""),
    program=program,
    settings=one_connection,
    source="NVIDIA/Megatron-LM d98e8a64 megatron/training/arguments.py, core/transformer/transformer_config.py, core/model_parallel_config.py",
)  # fmt: skip
__all__ = ["TARGET", "arguments", "layout"]
