"""The options that describe a run, once, for every command that takes one.

`takes_run` adds them to a command's signature and hands it a `Request`: the run spec that the model argument (or file) and the options describe.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..errors import SpecError, nearest

if TYPE_CHECKING:
    from ..measure.calibrate import Profile

Row = tuple[str, str, type, tuple[str, ...], str]

# (parameter, key of the run spec, type, flags, help). Megatron's long names are aliases.
RUN_OPTIONS: tuple[Row, ...] = (
    ("on", "cluster", str, ("--on",), "GPUs and their kind: 64xH100, 8xA100-40GB."),
    ("gpu", "cluster.gpu", str, ("--gpu",), "GPU of the catalogue, with --nodes."),
    ("nodes", "cluster.nodes", int, ("--nodes",), "Nodes."),
    ("gpus_per_node", "cluster.gpus_per_node", int, ("--gpus-per-node",), "GPUs of a node."),
    ("network_gbps", "cluster.network_gbps_per_gpu", float, ("--network-gbps",), "Network, Gb/s per GPU and direction."),
    ("scaleup_gpus", "cluster.scaleup_gpus", int, ("--scaleup-gpus",), "GPUs joined by NVLink or the like."),
    ("memory_margin", "cluster.memory_margin", float, ("--memory-margin",), "Share of the card kept free (0.04)."),
    ("host_memory_gb", "cluster.host_memory_gb", float, ("--host-memory-gb",), "RAM of a node, 1e9 bytes."),
    ("price", "cluster.usd_per_gpu_hour", float, ("--price",), "Dollars per GPU-hour."),
    ("seq_len", "training.seq_len", int, ("--seq-len", "--seq-length"), "Tokens of a sequence."),
    ("global_batch", "training.global_batch_size", int, ("--global-batch", "--global-batch-size"), "Sequences per optimizer step."),
    ("tokens", "training.tokens", str, ("--tokens",), "Tokens of the whole run: 2T, 15e12."),
    ("precision", "training.precision", str, ("--precision",), "bf16, fp16, fp32, fp8, fp4."),
    ("fp8_recipe", "training.fp8_recipe", str, ("--fp8-recipe",), "delayed, tensorwise, rowwise, blockwise, mxfp8."),
    ("optimizer", "training.optimizer", str, ("--optimizer",), "adamw, adam8bit, lion, muon, adafactor, sgd, ..."),
    ("master_weights", "training.master_weights", str, ("--master-weights",), "fp32 or none."),
    ("gradient_dtype", "training.gradient_dtype", str, ("--gradient-dtype",), "fp32, bf16, fp16."),
    ("loss", "training.loss", str, ("--loss",), "plain, chunked, fused, vocab-parallel."),
    ("method", "training.method", str, ("--method",), "full, lora, qlora."),
    ("lora_rank", "training.lora_rank", int, ("--lora-rank",), "Rank of the adapters."),
    ("base_quantization", "training.base_quantization", str, ("--base-quantization",), "nf4, int4, int8."),
    ("framework", "strategy.framework", str, ("--framework",), "megatron, fsdp2, fsdp1, ddp, deepspeed."),
    ("dp", "strategy.dp", int, ("--dp",), "Data-parallel ranks (replicas x shards)."),
    ("dp_replicate", "strategy.dp_replicate", int, ("--dp-replicate",), "Replicas of HSDP."),
    ("dp_shard", "strategy.dp_shard", int, ("--dp-shard",), "Shards of a replica."),
    ("tp", "strategy.tp", int, ("--tp", "--tensor-model-parallel-size"), "Tensor-parallel ranks."),
    ("pp", "strategy.pp", int, ("--pp", "--pipeline-model-parallel-size"), "Pipeline stages."),
    ("cp", "strategy.cp", int, ("--cp", "--context-parallel-size"), "Context-parallel ranks."),
    ("ep", "strategy.ep", int, ("--ep", "--expert-model-parallel-size"), "Expert-parallel ranks."),
    ("etp", "strategy.etp", int, ("--etp", "--expert-tensor-parallel-size"), "Tensor-parallel ranks inside an expert."),
    ("virtual_stages", "strategy.virtual_stages", int, ("--virtual-stages", "--vpp"), "Model chunks per pipeline rank."),
    ("micro_batch", "strategy.micro_batch_size", int, ("--micro-batch", "--micro-batch-size"), "Sequences per forward pass."),
    ("zero", "strategy.sharding", str, ("--zero", "--sharding"), "ZeRO stage 0 to 3, or none, ddp, fsdp."),
    ("sequence_parallel", "strategy.sequence_parallel", bool, ("--sequence-parallel/--no-sequence-parallel",), "Split norms over tp."),
    ("recompute", "strategy.recompute", str, ("--recompute", "--recompute-granularity"), "none, selective, full."),
    ("recompute_every", "strategy.recompute_every", int, ("--recompute-every",), "With full: one checkpoint every K layers."),
    ("schedule", "strategy.schedule", str, ("--schedule",), "Pipeline schedule: 1f1b, interleaved-1f1b, ..."),
    ("attention", "strategy.attention", str, ("--attention",), "flash, efficient, sdpa-math, eager."),
    ("offload", "strategy.offload", str, ("--offload",), "none, optimizer-cpu, params-cpu, ..."),
    ("compile_", "strategy.compile", bool, ("--compile/--no-compile",), "torch.compile each block."),
)


@dataclass(frozen=True)
class Request:
    """What the command line asks for: a run spec as a plain document, and files that add to the catalogues."""

    document: dict[str, Any]
    catalog_files: tuple[str, ...] = ()
    profile: Profile | None = None
    profile_file: str | None = None


def takes_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with a MODEL argument and every run option; its `request` parameter receives the `Request`."""
    own = [p for n, p in inspect.signature(command, eval_str=True).parameters.items() if n != "request"]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        said = {name: values.pop(name) for name, *_ in RUN_OPTIONS}
        profile = values.pop("profile")
        request = build_request(values.pop("model"), said, values.pop("set_") or [], tuple(values.pop("catalog") or ()))
        if profile:
            from ..measure.calibrate import read_profile

            request = replace(request, profile=read_profile(profile), profile_file=profile, catalog_files=(*request.catalog_files, profile))
        return command(request=request, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    model = inspect.Parameter(
        "model",
        keyword,
        default=typer.Argument(
            ..., help="A catalogue id, a config.json, a size such as 7B, a run spec (TOML or JSON), - for stdin.", show_default=False
        ),
        annotation=str,
    )
    options = [
        inspect.Parameter(name, keyword, default=typer.Option(None, *flags, help=text, show_default=False), annotation=kind | None)
        for name, _, kind, flags, text in RUN_OPTIONS
    ]
    more = [
        inspect.Parameter(
            "set_",
            keyword,
            default=typer.Option(None, "--set", help="Any key of the run spec: strategy.cp_kind=ulysses.", show_default=False),
            annotation=list[str] | None,
        ),
        inspect.Parameter(
            "profile",
            keyword,
            default=typer.Option(None, "--profile", help="A profile that `trainwright calibrate` wrote.", show_default=False),
            annotation=str | None,
        ),
        inspect.Parameter(
            "catalog",
            keyword,
            default=typer.Option(None, "--catalog", help="A file with more GPUs, prices, models.", show_default=False),
            annotation=list[str] | None,
        ),
    ]
    parameters = [model, *[p.replace(kind=keyword) for p in own], *options, *more]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def build_request(model: str, said: dict[str, Any], settings: list[str], catalog_files: tuple[str, ...] = ()) -> Request:
    """The document of a run spec file with the options laid over it, or one made of the options alone."""
    document = read_document(model)
    for name, key, *_ in RUN_OPTIONS:
        if said.get(name) is not None:
            _put(document, key, _value(name, said[name]))
    set_keys(document, settings)
    _with_adapters(said, document)
    if "cluster" not in document:
        raise SpecError("which GPUs? none are named", "--on", ["--on 8xH100"])
    return Request(document, catalog_files)


def _with_adapters(said: dict[str, Any], document: dict[str, Any]) -> None:
    """An option of adapters, on a run that has none, would change nothing."""
    training = document.get("training")
    method = training.get("method", "full") if isinstance(training, dict) else "full"
    for name, flag, methods in (("lora_rank", "--lora-rank", ("lora", "qlora")), ("base_quantization", "--base-quantization", ("qlora",))):
        if said.get(name) is not None and method in ("full", "lora") and method not in methods:
            raise SpecError(f"changes nothing with training.method {method}", flag, [f"--method {m}" for m in methods])


def set_keys(document: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The document with each ``section.key=value`` laid over it."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise SpecError(f"{setting[:80]!r} is not KEY=VALUE", "--set", ["strategy.cp_kind=ulysses"])
        key, value = key.strip(), text.strip()
        if key in ("model", "cluster"):
            _put(document, key, _literal(value) if value.startswith("{") and key == "model" else value)
            continue
        if "." not in key:
            _without_section(key)
        _put(document, key, _literal(value))
    return document


def _without_section(key: str) -> NoReturn:
    from ..spec.run import keys

    every = {f"{section}.{name}": name for section in ("cluster", "training", "strategy") for name in keys([section])}
    near = [path for word in nearest(key, every.values()) for path, name in every.items() if name == word]
    raise SpecError(f"{key[:80]!r} is in no section of the run spec", "--set", near or ["strategy.cp_kind"])


def read_document(model: str) -> dict[str, Any]:
    """{"model": ...} for a name, a size or a config.json; the whole document for a run spec."""
    from ..api import parse_document
    from .output import read_text

    if model == "-" or model.lower().endswith((".toml", ".json", ".yaml", ".yml")):
        found = parse_document(read_text(model), "stdin" if model == "-" else model)
        if not isinstance(found.get("model_type"), str) and {"model", "cluster", "training", "strategy"} & set(found):
            return found
        return {"model": found} if model == "-" else {"model": model}
    return {"model": model}


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    from ..spec.run import parse_cluster

    if key == "cluster":
        current = document.get("cluster")
        document["cluster"] = {**(current if isinstance(current, dict) else {}), **parse_cluster(value)}
        return
    if isinstance(document.get("cluster"), str) and key.startswith("cluster."):
        document["cluster"] = parse_cluster(document["cluster"])
    *path, name = key.split(".")
    place: Any = document
    for section in path:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise SpecError(f"{section} is no table", key)
    place[name] = value


def _value(name: str, value: Any) -> Any:
    from ..units import parse_count

    return parse_count(value, "--tokens") if name == "tokens" else value


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
