"""The run spec: the one document that describes a training run, checked at the door.

`RunSpec` keeps what was said and what was left open apart: an open field is None. `trainwright.api` resolves it to
(ModelSpec, ClusterSpec, TrainingJob, ParallelPlan); `trainwright.search` fills what ``[strategy]`` leaves free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from math import ceil, floor, isnan
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from ..errors import SpecError, nearest, one_line
from ..units import parse_count

MAX_GPUS = 10_000_000
Count = Annotated[int, Field(ge=1, le=MAX_GPUS)]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
SHARDING_ALIASES = {
    "ddp": "none",
    "fsdp": "zero3",
    "hsdp": "zero3",
    "zero-1": "zero1",
    "zero-2": "zero2",
    "zero-3": "zero3",
    "0": "none",
    "1": "zero1",
    "2": "zero2",
    "3": "zero3",
}
KINDS = {"model_type": "a table", "dict_type": "a table", "tuple_type": "a list", "string_type": "a text"}  # pydantic's word: ours
BOUNDS = {
    "greater_than_equal": ("ge", 0),
    "less_than_equal": ("le", 0),
    "greater_than": ("gt", 1),
    "less_than": ("lt", -0.01),
}  # and how far inside of it
HUGE = 2**62  # beyond every bound here
_DATE = r"^20[0-9]{2}-(0[1-9]|1[0-2])$"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: Any, info: Any) -> Any:
        annotation = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and "bool" not in annotation:
            raise ValueError("true and false are no numbers")
        return value


class ClusterSection(Section):
    """``[cluster]``. `gpu` is a catalogue id, an alias, or a table of the catalogue's own keys."""

    gpu: str | dict[str, Any]
    nodes: Count | None = None
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    network_gbps_per_gpu: Annotated[float, Field(gt=0, le=100_000)] | None = None
    network_latency_us: Annotated[float, Field(ge=0, le=1e6)] | None = None
    memory_margin: Annotated[float, Field(ge=0, lt=1)] = 0.04
    scaleup_gpus: Count | None = None
    host_memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    nvme_tb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    usd_per_gpu_hour: Annotated[float, Field(ge=0, le=1e5)] | None = None


class TrainingSection(Section):
    """``[training]``."""

    seq_len: Annotated[int, Field(ge=1, le=2**27)] | None = None
    global_batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    tokens: Annotated[float, Field(gt=0, le=1e18)] | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8", "fp4"] = "bf16"
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] | None = None
    optimizer: Literal["adamw", "adam8bit", "paged_adam8bit", "adafactor", "lion", "muon", "sgd", "sgd_momentum"] = "adamw"
    master_weights: Literal["fp32", "none"] | None = None
    autocast: bool = False
    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    optimizer_kernel: Literal["fused", "foreach", "for-loop"] = "fused"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    packing: bool = False
    mean_document_len: Annotated[int, Field(ge=1, le=2**27)] | None = None
    optimizer_in_backward: bool = False
    moe_capacity_factor: Annotated[float, Field(gt=0, le=1000)] | None = None
    loss: Literal["plain", "chunked", "fused", "vocab-parallel"] | None = None
    loss_chunks: Annotated[int, Field(ge=1, le=4096)] = 8
    method: Literal["full", "lora", "qlora"] = "full"
    lora_rank: Annotated[int, Field(ge=1, le=65536)] = 16
    lora_targets: tuple[str, ...] | None = None
    base_quantization: Literal["nf4", "int4", "int8"] | None = None


def _sharding(value: Any) -> Any:
    text = str(value).lower()
    return SHARDING_ALIASES.get(text, text) if isinstance(value, (str, int)) and not isinstance(value, bool) else value


class StrategySection(Section):
    """``[strategy]``; None is free."""

    framework: Literal["megatron", "fsdp2", "fsdp1", "ddp", "deepspeed"] | None = None
    framework_date: Annotated[str, Field(pattern=_DATE)] | None = None
    dp: Count | None = None
    dp_replicate: Count | None = None
    dp_shard: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    etp: Count | None = None
    cp_kind: Literal["ring", "allgather", "ulysses"] | None = None
    async_tp: bool | None = None
    cuda_graphs: bool | None = None
    sharding: Annotated[Sharding, BeforeValidator(_sharding)] | None = None
    sequence_parallel: bool | None = None
    micro_batch_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    schedule: Literal[
        "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v",
        "eager-1f1b", "looped-bfs", "interleaved-zb1p",
    ] | None = None  # fmt: skip
    virtual_stages: Annotated[int, Field(ge=1, le=1024)] | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    recompute_every: Annotated[int, Field(ge=1, le=4096)] | None = None
    recompute_modules: tuple[Literal["core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...] | None = None
    attention: Literal["flash", "efficient", "sdpa-math", "eager"] | None = None
    offload: Literal["none", "optimizer-cpu", "params-cpu", "optimizer-nvme", "params-nvme", "activations-cpu"] | None = None
    reshard_root: bool | None = None
    reserved_gb: Annotated[float, Field(ge=0, le=1e5)] | None = None
    fp8_params: bool | None = None
    compile: bool | None = None
    layers_per_stage: tuple[Annotated[int, Field(ge=0, le=10**5)], ...] | None = None
    options: dict[str, Any] | None = None


class RunSpec(Section):
    """One training run. `model` is a catalogue id, a path to a ``config.json``, a size such as ``7B``, or a table of its keys."""

    model: str | dict[str, Any]
    cluster: ClusterSection
    training: TrainingSection = TrainingSection()
    strategy: StrategySection = StrategySection()


def parse_cluster(text: str) -> dict[str, Any]:
    """``64xH100`` -> {"gpu": "H100", "gpus": 64}-like table; a node holds 8 (or the catalogue's own number) unless fewer are asked for."""
    count, times, gpu = text.strip().replace("×", "x").partition("x")
    if not times or not count.strip().isdigit() or not gpu.strip():
        raise SpecError(f"{text[:60]!r} is not a number of GPUs and a GPU", "cluster", ["64xH100", "8xA100-40GB"])
    total = int(count)
    if not 1 <= total <= MAX_GPUS:
        raise SpecError(f"{total} GPUs are not between 1 and {MAX_GPUS:,}", "cluster")
    return {"gpu": gpu.strip(), "nodes": None, "gpus_per_node": None} | split_nodes(total)


def split_nodes(total: int, per_node: int = 8) -> dict[str, int]:
    """A number of GPUs as whole nodes: the largest node size up to `per_node` that divides it."""
    size = next(n for n in range(min(per_node, total), 0, -1) if total % n == 0)
    return {"nodes": total // size, "gpus_per_node": size}


def validate(document: dict[str, Any]) -> RunSpec:
    """A dict -> RunSpec, or `SpecError` that names the first wrong key or value and what would be right."""
    if isinstance(document, dict) and isinstance(document.get("cluster"), str):
        document = {**document, "cluster": parse_cluster(document["cluster"])}
    if not isinstance(document, dict):
        raise SpecError(f"a run spec is a table with model, cluster, training, strategy; found {type(document).__name__}")
    try:
        return RunSpec.model_validate(document)
    except ValidationError as error:
        raise _spec_error(error) from None


def _spec_error(error: ValidationError) -> SpecError:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    path = [str(p) for p in first["loc"]]
    where = ".".join(p for p in path if p not in ("str", "dict[str,any]", "int", "float"))
    given = first.get("input")
    found = one_line(str(given) if isinstance(given, date) else repr(given), 80)
    if first["type"] == "extra_forbidden":
        known = keys(path[:-1])
        return SpecError(f"unknown key {path[-1][:80]!r}", ".".join(path[:-1]), nearest(path[-1], known) or known)
    if first["type"] == "missing":
        return SpecError("is missing", where)
    if first["type"] == "literal_error":
        choices = [c.strip().strip("'") for c in str(first["ctx"]["expected"]).replace(" or ", ", ").split(",")]
        return SpecError(f"{found} is not one of {', '.join(choices)}", where, nearest(first.get("input"), choices))
    if first["type"] in KINDS:
        listed = _as_list(given, path) if first["type"] == "tuple_type" and isinstance(given, (str, int)) else []
        return SpecError(f"{found} is not {KINDS[first['type']]}", where, listed)
    message = first["msg"].removeprefix("Value error, ")
    return SpecError(f"{found}: {message[0].lower()}{message[1:]}", where, _near(first, path, given))


def _near(error: Mapping[str, Any], path: list[str], given: Any) -> list[int | float]:
    """The legal number nearest to a wrong one, where there is one."""
    kind, bounds = error["type"], error.get("ctx", {})
    if kind in ("int_parsing", "float_parsing"):  # 2T, as the command line writes it
        with suppress(SpecError):
            meant = parse_count(str(given))
            return [int(meant)] if meant > 0 and meant == int(meant) else []
        return []
    if kind in ("finite_number", "int_parsing_size") and not isnan(float(given)):
        kind, bounds = _beyond(path, HUGE if float(given) > 0 else -HUGE)
    return _within(kind, bounds, given)


def _beyond(path: list[str], huge: int) -> tuple[str, Mapping[str, Any]]:
    """What is said of a finite number that is as far out of range: its kind and its bounds."""
    field = _section(path[:-1]).model_fields[path[-1]]
    try:
        TypeAdapter[Any](Annotated[field.annotation, field]).validate_python(huge)  # type: ignore[arg-type]
    except ValidationError as error:
        found = next((e for e in error.errors() if e["type"] in BOUNDS), None)
        return ("", {}) if found is None else (found["type"], found.get("ctx", {}))
    return "", {}


def _within(kind: str, bounds: Mapping[str, Any], given: Any) -> list[int | float]:
    """The legal number nearest to one that is out of range; of an open range one that is well inside."""
    if kind == "int_from_float":
        return [floor(given), ceil(given)]
    found = BOUNDS.get(kind)
    return [] if found is None else [bounds[found[0]] + found[1]]


def _as_list(given: str | int, path: list[str]) -> list[str]:
    """What was meant as a list, as TOML and JSON write it, with what may stand in it: ``3,4`` -> ``[3, 4]``."""
    words = [p.strip().strip("'\"") for p in str(given).strip("[]()").split(",") if p.strip()]
    parts = [int(p) if p.lstrip("-").isdigit() else p for p in words]
    field: Any = _section(path[:-1]).model_fields[path[-1]]
    found = [p for p in parts if _legal(field.annotation, (p,))]
    return [json.dumps(found)] if found else []


def _legal(kind: Any, value: object) -> bool:
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _section(path: list[str]) -> type[Section]:
    sections: dict[str, type[Section]] = {"cluster": ClusterSection, "training": TrainingSection, "strategy": StrategySection}
    found: type[Section] = RunSpec
    for name in path:
        found = sections.get(name, found)
    return found


def keys(path: list[str]) -> list[str]:
    """The keys of a section of the run spec, or of its whole."""
    return sorted(_section(path).model_fields)
