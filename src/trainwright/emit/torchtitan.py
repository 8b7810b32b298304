"""torchtitan: ``--module --config --section.key`` for 0.3 (what pip installs), ``train.toml`` for releases before.

From 0.3 a config is a Python function. The emitted ``plan_config.py`` holds what has no flag (the model's flavor, the kind of loss, formats,
which layer stands on which stage); everything else is flags, so that a change on the command line stays possible.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import gcd
from typing import Any

from ..resolve import Run
from ..schedules import SCHEDULES as PIPELINES
from .base import Files, Limit, Options, Target, only, said, when
from .common import tokens_of
from .environment import settings
from .launch import Flags, Program, launched, script, world
from .rate import torchtitan_rate
from .shell import flags_of, number
from .torchtitan_plan import BILLIONS, CONVERTERS, DEGREES, FLAVORS, PRESETS, SCHEDULES, TOKENIZERS, is_old, sections, stage_layers
from .torchtitan_toml import read_quantize, toml

MODULE, TOML = "plan_config.py", "train.toml"
REDUCES = ("no_sync", False)  # its loop reduces the gradients of every micro-batch (torchtitan/train.py train_step)


def flags(run: Run, options: Options) -> Flags:
    """Flags of 0.3, checked by its own ConfigManager."""
    found: Flags = [("--module", MODULE.removesuffix(".py")), ("--config", "plan")]
    document = sections(run)
    document["training"] |= {"max_norm": options.clip, "disable_cuda_graphs": not run.plan.structure.cuda_graphs}
    document["parallelism"]["enable_sequence_parallel"] = run.plan.structure.sequence_parallel
    document["checkpoint"] = {"enable": True, "interval": options.checkpoint_steps}
    document |= torchtitan_rate(run, options)
    for section, keys in document.items():
        for key, value in keys.items():
            if value is False:
                found.append((f"--{section}.no-{key.replace('_', '-')}", True))
            else:
                found.append((f"--{section}.{key.replace('_', '-')}", value))
    return [*found, ("--dump-folder", options.output)]


def program(run: Run, options: Options) -> Program:
    if is_old(options):
        return Program(("-m", "torchtitan.train"), (("--job.config_file", TOML),), stop_signal="")
    return Program(
        ("-m", "torchtitan.train"), tuple(flags(run, options)), (f"activation-checkpoint:{run.plan.structure.recompute}",), stop_signal=""
    )


def stages(run: Run) -> list[str] | None:
    """The modules of each stage as Python; None without a pipeline."""
    held = stage_layers(run)
    if held is None:
        return None
    parts = [[f"*layers({r.start}, {r.stop})"] for r in held]
    parts[0].insert(0, '"tok_embeddings"')
    parts[-1] += ['"norm"', '"lm_head"']
    return [f"[{', '.join(part)}]" for part in parts]


def module(run: Run, options: Options) -> str:
    """``plan_config.py``: names of a closed list and numbers, nothing that anybody typed."""
    name, flavor = FLAVORS[run.model.name]
    job, compiled = run.job, run.plan.structure.compile
    converter = CONVERTERS.get(job.fp8_recipe or "")
    imports = ["from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"]
    convert = ""
    if converter:
        imports.append(f"from torchtitan.components.quantization import {converter}")
        filters = ', filter_fqns=["lm_head"]' if converter == "Float8LinearConverter" else ""
        convert = f", converters=[{converter}.Config(model_compile_enabled={compiled}{filters})]"
    imports.append("from torchtitan.models.common.config_utils import decoder_vocab_size")
    imports.append(f"from torchtitan.models.{name} import model_registry")
    imports.append(f"from torchtitan.models.{name}.config_registry import {PRESETS[name]}")
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))"
    if job.loss == "chunked":
        loss = f"ChunkedLossWrapper.Config(num_chunks={job.loss_chunks}, loss_fn={loss})"
    lines = [
        f"    config = {PRESETS[name]}()",
        f'    config.model_spec = model_registry("{flavor}"{convert})',
        f"    config.loss = {loss}",
        "    for group in config.optimizer.param_groups:",
        f'        group.optimizer_kwargs["lr"] = {float(options.learning_rate)!r}',
    ]
    if (options.betas, options.weight_decay) != (Options.betas, Options.weight_decay):  # those of its presets
        lines.append(f'        group.optimizer_kwargs["betas"] = ({float(options.betas[0])!r}, {float(options.betas[1])!r})')
        lines.append(f'        group.optimizer_kwargs["weight_decay"] = {float(options.weight_decay)!r}')
    parts = stages(run)
    if parts is not None:
        rows = "".join(f"        {part},\n" for part in parts)
        lines.append(f"    config.parallelism.module_fqns_per_model_part = [\n{rows}    ]")
    helper = ""
    if parts is not None:
        helper = '\n\ndef layers(first, end):\n    return [f"layers.{i}" for i in range(first, end)]\n'
    title = '"""The part of the plan that torchtitan has no flags for."""\n\n'
    return title + "\n".join(imports) + "\n" + helper + "\n\ndef plan():\n" + "\n".join(lines) + "\n    return config\n"


def write(run: Run, options: Options) -> Files:
    files = {TOML: toml(run, options)} if is_old(options) else {MODULE: module(run, options)}
    return {**files, "launch.sh": script(run, options, program(run, options), settings(run, TARGET, options))}


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """0.3's flags with their module, or a TOML known by its sections."""
    if TOML in files:
        try:
            document = tomllib.loads(files[TOML])
        except tomllib.TOMLDecodeError:
            return None
        if not {"training", "parallelism"} <= document.keys():
            return None
        mode = document.get("activation_checkpoint", {}).get("mode", "none")
        fields = _fields(document, launched(files)) | {"strategy.recompute": mode, "training.loss": "plain"} | read_quantize(document)
        return said(fields | {"strategy.sequence_parallel": fields["strategy.tp"] > 1})
    text = next((files[n] for n in ("launch.sh", "job.sbatch") if "torchtitan.train" in files.get(n, "")), "")
    if not text:
        return None
    found = _sections_of(flags_of(text))
    fields = _fields(found, launched(files))
    fields["strategy.recompute"] = next((w.split(":")[1].strip() for w in text.split() if w.startswith("activation-checkpoint:")), None)
    return said(fields | _read_module(files.get(MODULE, "")))


def _sections_of(given: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = {}
    for flag, values in given.items():
        section, dot, key = flag.removeprefix("--").partition(".")
        if not dot:
            continue
        off = key.startswith("no-")
        key = key.removeprefix("no-").replace("-", "_")
        whole = number({"x": values}, "x")
        document.setdefault(section, {})[key] = not off if off or not values else whole if whole is not None else values[0]
    return document


def _fields(document: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    t, p = document.get("training", {}), document.get("parallelism", {})
    degrees = {axis: p.get(key, 1) for axis, key in DEGREES.items()}
    gpus = world(fields)
    if degrees["dp_shard"] == -1 and gpus:
        degrees["dp_shard"] = gpus // (degrees["dp_replicate"] * degrees["tp"] * degrees["pp"] * degrees["cp"])
    pipelined = degrees["pp"] > 1
    micro = p.get("pipeline_parallel_microbatch_size", 1) if pipelined else t.get("local_batch_size")
    reshard = p.get("fsdp_reshard_after_forward", "default")
    fields |= {f"strategy.{axis}": size for axis, size in degrees.items()}
    batch, seq_len, wide = t.get("global_batch_size"), t.get("seq_len"), t.get("mixed_precision_param") == "float32"
    sharding = "none" if degrees["dp_shard"] == 1 and reshard == "default" else "zero2" if reshard == "never" else "zero3"
    return fields | {
        "strategy.framework": "fsdp2",
        "strategy.dp": degrees["dp_replicate"] * degrees["dp_shard"],
        "strategy.sharding": sharding,
        "strategy.options": dict([REDUCES]) if sharding != "none" else None,
        "strategy.reshard_root": reshard == "always" if sharding == "zero3" else None,
        "strategy.sequence_parallel": p.get("enable_sequence_parallel"),
        "strategy.schedule": {v: k for k, v in SCHEDULES.items()}.get(p.get("pipeline_parallel_schedule")) if pipelined else "1f1b",
        "strategy.micro_batch_size": micro,
        "strategy.offload": "params-cpu" if t.get("enable_cpu_offload") else "none",
        "strategy.compile": bool(document.get("compile", {}).get("enable")),
        "strategy.async_tp": bool({**p, **document.get("compile", {})}.get("enable_async_tensor_parallel")),
        "strategy.cuda_graphs": not t.get("disable_cuda_graphs", True),
        "training.global_batch_size": batch,
        "training.seq_len": seq_len,
        "training.tokens": tokens_of(t.get("steps"), batch, seq_len),
        "training.master_weights": "none" if wide or t.get("dtype") == "bfloat16" else "fp32",
        "training.gradient_dtype": {"float32": "fp32"}.get(t.get("mixed_precision_reduce")),
        "training.optimizer_kernel": document.get("optimizer", {}).get("implementation"),
        "training.precision": "fp32" if wide else "bf16",
    }


def _read_module(text: str) -> dict[str, Any]:
    """What the emitted module says; it is read as text, never imported."""
    if "def plan()" not in text:
        return {}
    recipe = next((r for r, name in CONVERTERS.items() if f"{name}.Config" in text), None)
    _, found, rest = text.partition("num_chunks=")
    chunks = int(rest.split(",")[0]) if found and rest.split(",")[0].isdigit() else None
    return {
        "training.loss": "chunked" if "ChunkedLossWrapper.Config" in text else "plain",
        "training.loss_chunks": chunks,
    } | ({"training.precision": "fp8", "training.fp8_recipe": recipe} if recipe else {})


def expert_ranks(run: Run) -> int:
    """Ranks of one replica that experts can be spread over."""
    return run.plan.dp_shard * run.plan.cp * run.plan.tp


def _nearest_model(run: Run) -> dict[str, Any]:
    size = run.model.parameters / 1e9
    return {"model": min(BILLIONS, key=lambda name: abs(BILLIONS[name] / size - 1) if BILLIONS[name] > size else size / BILLIONS[name] - 1)}


def _install(run: Run, options: Options) -> str:
    version = options.torchtitan_version
    if is_old(options):
        return f"`git clone -b v{version} https://github.com/pytorch/torchtitan`"
    # Run with 2.13: its FSDP refuses the parameters (spmd_types), and `torch.distributed.set_timeout`, called after the first step, is not there.
    return f"a nightly of PyTorch (2.13 is too old for it), `pip install torchtitan=={version}{' torchao' if run.job.precision == 'fp8' else ''}`"


def _command(run: Run, options: Options) -> str:
    """What its preset reads has to be there too, and is of the preset's model."""
    line = "`bash launch.sh`" + (" on every node, HEAD_NODE set to the first" if run.cluster.nodes > 1 else "")
    if is_old(options):
        return line
    folder = f"assets/hf/{TOKENIZERS[FLAVORS[run.model.name][0]]}"
    return f"{line}; it trains on C4 with the tokenizer in `{folder}`: name yours with `--dataloader.dataset` and `--hf-assets-path` in it"


LIMITS = (
    only("strategy.framework", ["fsdp2"], "is FSDP2 and DTensor"),
    Limit("model", lambda run: run.model.name in FLAVORS, "has no flavor of this model", _nearest_model),
    only("strategy.schedule", list(SCHEDULES), "has no such schedule"),
    only("strategy.etp", [1], "splits experts over ep only"),
    when(
        lambda run: run.plan.structure.sharding == "zero3" and run.plan.dp_shard == 1,
        only("strategy.reshard_root", [True], "takes one shard for plain replicas unless told to reshard"),
    ),
    when(
        lambda run: run.plan.pp > 1 and run.plan.structure.sharding == "zero3",
        only("strategy.reshard_root", [True], "keeps every parameter gathered in a pipeline unless told otherwise for all"),
    ),
    when(
        lambda run: run.plan.pp > 1 and PIPELINES[run.plan.structure.schedule].splits_backward,
        only("strategy.sharding", ["zero2", "none"], "loses the gradients of weights that a split backward finds sharded again (PyTorch 2.13)"),
    ),
    when(lambda run: run.plan.cp > 1, only("strategy.cp_kind", ["allgather"], "gathers keys and values (FlexAttention)")),
    only("strategy.offload", ["none", "params-cpu"], "offloads parameters with their optimizer"),
    only("strategy.recompute_every", [1], "recomputes every block"),
    only("strategy.recompute_modules", [None], "recomputes whole blocks, or every second product"),
    only("strategy.attention", ["flash"], "runs FlexAttention"),
    when(lambda run: run.plan.structure.async_tp, only("strategy.compile", [True], "overlaps tensor parallelism in compiled blocks only")),
    when(
        lambda run: run.plan.pp > 1 or run.plan.ep > 1,
        only("strategy.cuda_graphs", [False], "captures neither a pipeline nor the dispatch to experts in graphs"),
    ),
    Limit(
        "strategy.ep",
        lambda run: expert_ranks(run) % run.plan.ep == 0,
        "spreads experts over dp_shard x cp x tp ranks, never over replicas",
        lambda run: {"strategy.ep": gcd(run.plan.ep, expert_ranks(run))},
    ),
    only("strategy.fp8_params", [False], "gathers parameters in 16 bits"),
    only("training.precision", ["bf16", "fp8", "fp32"], "multiplies in bf16, fp8 or fp32"),
    when(lambda run: run.job.precision == "fp8", only("training.fp8_recipe", list(CONVERTERS), "converts to rowwise or MX fp8")),
    when(lambda run: run.job.precision != "fp8", only("training.fp8_recipe", [None], "needs fp8 for a recipe")),
    when(lambda run: run.job.precision == "fp8", only("strategy.compile", [True], "converts compiled models only")),
    Limit(
        "training.master_weights", lambda run: run.job.precision != "fp8" or run.job.master_weights == "fp32", "keeps fp32 parameters under fp8",
        lambda run: {"training.master_weights": "fp32"},
    ),
    only("training.gradient_dtype", ["fp32"], "reduces gradients in fp32"),
    only("training.optimizer", ["adamw"], "is given AdamW here"),
    Limit(
        "strategy.options",
        lambda run: all(option == REDUCES for option in run.plan.structure.options),
        "reduces gradients after each micro-batch and has flags for none of the options of a plan",
        lambda run: {"strategy.options": dict([REDUCES])},
    ),
    only("training.autocast", [False], "casts by FSDP's policy"),
    only("training.loss", ["plain", "chunked"], "computes the loss whole or in chunks"),
    only("training.method", ["full"], "trains every parameter"),
    only("training.optimizer_in_backward", [False], "steps after backward"),
    only("training.dropout", [0.0], "has no dropout"),
    only("training.moe_capacity_factor", [None], "drops no token"),
    when(lambda run: run.plan.tp == 1, only("strategy.sequence_parallel", [False], "has sequence parallelism in tensor parallelism only")),
)  # fmt: skip
TARGET = Target(
    name="torchtitan",
    title="torchtitan",
    aliases=("titan",),
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes", "cluster.gpus_per_node",
        *(f"strategy.{k}" for k in (
            "framework", "sharding", "dp", *DEGREES, "sequence_parallel", "schedule", "micro_batch_size", "recompute", "offload", "compile",
            "async_tp", "cuda_graphs",
        )),
        *(f"training.{k}" for k in ("seq_len", "global_batch_size", "tokens", "precision", "master_weights", "gradient_dtype", "optimizer_kernel", "loss")),
    ),
    leaves=(
        "training.packing", "training.loss_chunks", "training.lora_rank", "training.lora_targets", "training.base_quantization", "strategy.cp_kind",
        "strategy.layers_per_stage", "strategy.virtual_stages", "strategy.reshard_root",
    ),
    install=_install,
    command=_command,
    program=program,
    source="torchtitan 0.3.0 config/configs.py, config/manager.py, trainer.py, models/*/config_registry.py; 0.2.0 config/job_config.py",
)  # fmt: skip
__all__ = ["TARGET", "flags"]
