"""From a run spec to what the equations take: (ModelSpec, ClusterSpec, TrainingJob, ParallelPlan), every open field filled.

What is filled without being said is told twice: in the filled spec and, where it changes the answer much (sequence length, batch, price), as
*assumed*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .catalog.load import build_cluster, load_model
from .errors import SpecError
from .frameworks import FRAMEWORKS
from .frameworks.base import Framework
from .frameworks.dtypes import dtypes
from .frameworks.effect import without_effect
from .models.adapters import lora_targets
from .schedules import SCHEDULES
from .spec.cluster import ClusterSpec
from .spec.job import TrainingJob
from .spec.model import ModelSpec
from .spec.plan import ParallelPlan, Structure
from .spec.precision import activation_dtype
from .spec.run import RunSpec, StrategySection, TrainingSection

DEFAULT_SEQ_LEN = 8192
DEFAULT_BATCH_TOKENS = 4 * 2**20


@dataclass(frozen=True)
class Run:
    """One fully specified run."""

    spec: RunSpec
    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    plan: ParallelPlan
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def filled(self) -> dict[str, Any]:
        """The run spec with every field filled, as plain JSON."""
        return filled_spec(self.spec, self.cluster, self.job, self.plan)


@dataclass(frozen=True)
class Task:
    """A run whose layout is still open: what the search gets."""

    spec: RunSpec
    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    framework: Framework
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def resolve_task(spec: RunSpec, catalog_files: tuple[str, ...] = ()) -> Task:
    """Everything but the layout. The batch is a multiple of what `[strategy]` fixes of data parallelism."""
    model = load_model(spec.model, catalog_files=catalog_files)
    cluster = build_cluster(spec.cluster, catalog_files=catalog_files)
    framework = FRAMEWORKS.get_or_raise(spec.strategy.framework or "fsdp2", "strategy.framework")
    fixed = spec.strategy
    dp = fixed.dp or _product(fixed.dp_replicate, fixed.dp_shard) or _largest_dp(spec, cluster, model)
    job, assumed, warnings = resolve_job(spec.training, model, framework, dp * (fixed.micro_batch_size or 1))
    notes = (*warnings, *_without_effect(spec, framework, model, cluster, job))
    return Task(spec, model, cluster, job, framework, (*model.notes, *cluster.assumed, *assumed), notes)


def _largest_dp(spec: RunSpec, cluster: ClusterSpec, model: ModelSpec) -> int:
    """The most data parallelism that the default batch can feed where dp is open: the largest divisor of what tp, pp and cp leave."""
    fixed = spec.strategy
    rest = cluster.gpus // ((fixed.tp or 1) * (fixed.pp or 1) * (fixed.cp or 1))
    most = max(1, round(DEFAULT_BATCH_TOKENS / (spec.training.seq_len or min(DEFAULT_SEQ_LEN, model.max_positions))))
    return max((d for d in range(1, min(rest, most) + 1) if rest % d == 0), default=1)


def resolve(spec: RunSpec, catalog_files: tuple[str, ...] = ()) -> Run:
    """The documented default for whatever is left open (contract section 1)."""
    model = load_model(spec.model, catalog_files=catalog_files)
    cluster = build_cluster(spec.cluster, catalog_files=catalog_files)
    framework = FRAMEWORKS.get_or_raise(spec.strategy.framework or "fsdp2", "strategy.framework")
    shape = resolve_layout(spec.strategy, cluster, framework)
    job, assumed, warnings = resolve_job(spec.training, model, framework, shape.dp * shape.micro_batch_size)
    plan = replace(shape, accumulation=accumulation_steps(job, shape))
    warnings = (*warnings, *_without_effect(spec, framework, model, cluster, job))
    return Run(spec, model, cluster, job, plan, (*model.notes, *cluster.assumed, *assumed, *_put_off(plan, model.family)), warnings)


def _without_effect(spec: RunSpec, framework: Framework, model: ModelSpec, cluster: ClusterSpec, job: TrainingJob) -> tuple[str, ...]:
    structure = resolve_structure(spec.strategy, framework, spec.strategy.tp or 1, spec.strategy.virtual_stages or 1)
    types = dtypes(framework, job, structure, alone=cluster.gpus == 1)
    named = spec.strategy.schedule
    lists = (f"strategy.schedule: {framework.title} has no {named}; `trainwright train` runs it from its list of actions",)
    own = lists if named and named not in framework.schedules and framework.runs_lists and (spec.strategy.pp or 1) > 1 else ()
    return own + without_effect(spec, framework, job, types, moe=model.is_moe, gpus=cluster.gpus)


def _put_off(plan: ParallelPlan, family: str) -> tuple[str, ...]:
    """FSDP that accumulates without being told how: the default costs memory that many loops do not pay."""
    s = plan.structure
    sharded = s.framework in ("fsdp1", "fsdp2") and s.sharding in ("zero2", "zero3") and plan.accumulation > 1
    if not sharded or "no_sync" in dict(s.options) or not FRAMEWORKS[s.framework].memory.puts_off(family, s):
        return ()
    return (
        f"whole gradients are kept over the {plan.accumulation} micro-batches and reduced once (strategy.options.no_sync=false keeps shards)",
    )


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def resolve_job(
    t: TrainingSection, model: ModelSpec, framework: Framework, replicas: int
) -> tuple[TrainingJob, tuple[str, ...], tuple[str, ...]]:
    """`replicas` is sequences per micro-step of the whole cluster; an open batch is the multiple of it nearest to 4 Mi tokens."""
    assumed, warnings = [], []
    seq_len = t.seq_len
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN, model.max_positions)
        assumed.append(f"sequence length {seq_len:,} (the smaller of {DEFAULT_SEQ_LEN:,} and what the model allows)")
    if seq_len > model.max_positions:
        warnings.append(f"sequence length {seq_len:,} is beyond the model's {model.max_positions:,} positions")
    batch = t.global_batch_size
    if batch is None:
        batch = max(1, round(DEFAULT_BATCH_TOKENS / seq_len / replicas)) * replicas
        assumed.append(f"global batch {batch:,} sequences ({_mebi(batch * seq_len)} tokens, the multiple of {replicas} nearest to 4 Mi)")
    wide = t.precision == "fp32"
    defaults = framework.defaults
    own = "fp32" if t.autocast else activation_dtype(t.precision)  # DDP's gradients are the weights'
    gradient = t.gradient_dtype or ("fp32" if wide else str(defaults.get("gradient_dtype", own)))
    if t.gradient_dtype is None and t.precision == "fp16" and gradient == "bf16":
        gradient = "fp16"
    masters = t.master_weights or ("none" if wide else str(defaults.get("master_weights", "fp32")))
    job = TrainingJob(
        seq_len=seq_len,
        global_batch_size=batch,
        tokens=t.tokens,
        precision=t.precision,
        fp8_recipe=t.fp8_recipe,
        optimizer=t.optimizer,
        master_weights=masters,
        autocast=t.autocast,
        gradient_dtype=gradient,
        optimizer_kernel=t.optimizer_kernel,
        dropout=t.dropout,
        packing=t.packing,
        mean_document_len=t.mean_document_len,
        optimizer_in_backward=t.optimizer_in_backward,
        moe_capacity_factor=t.moe_capacity_factor,
        loss=t.loss or str(defaults.get("loss", "plain")),
        loss_chunks=t.loss_chunks,
        method=t.method,
        lora_rank=t.lora_rank,
        lora_targets=lora_targets(model, t.lora_targets) if t.method != "full" else (),
        base_quantization=(t.base_quantization or "nf4") if t.method == "qlora" else None,
    )
    return job, tuple(assumed), tuple(warnings)


def _mebi(tokens: int) -> str:
    return f"{tokens / 2**20:,.0f} Mi" if tokens >= 1000 * 2**20 else f"{tokens / 2**20:.3g} Mi"


def resolve_structure(s: StrategySection, framework: Framework, tp: int = 1, virtual_stages: int = 1) -> Structure:
    """The choices that are no numbers; open ones take the framework's default, or the contract's."""
    defaults = framework.defaults
    sharding = s.sharding or str(defaults.get("sharding", "zero3"))
    parallel = s.sequence_parallel
    if parallel is None:
        parallel = tp > 1 and bool(defaults.get("sequence_parallel", False))
    return Structure(
        framework=framework.name,
        framework_date=s.framework_date,
        sharding=sharding,
        sequence_parallel=parallel,
        cp_kind=s.cp_kind or str(defaults.get("cp_kind", "ring")),
        async_tp=bool(s.async_tp),
        cuda_graphs=bool(s.cuda_graphs),
        schedule=s.schedule or ("interleaved-1f1b" if virtual_stages > 1 else "1f1b"),
        recompute=s.recompute or ("full" if s.recompute_every else "none"),
        recompute_every=s.recompute_every or 1,
        recompute_modules=s.recompute_modules or (),
        attention=s.attention or "flash",
        offload=s.offload or "none",
        reshard_root=True if s.reshard_root is None else s.reshard_root,
        reserved_gb=s.reserved_gb or 0.0,
        fp8_params=bool(s.fp8_params),
        compile=bool(s.compile),
        layers_per_stage=s.layers_per_stage,
        options=tuple(sorted((k, _option(k, v)) for k, v in (s.options or {}).items())),
    )


def _option(name: str, value: Any) -> Any:
    """A framework's own knob: a word, a number, true or false, or a list of them."""
    if isinstance(value, (list, tuple)):
        return tuple(_option(name, v) for v in value)
    if not isinstance(value, (str, int, float, bool)):
        raise SpecError(f"{type(value).__name__} is no word, number, true or false", f"strategy.options.{name[:60]}")
    return value


def resolve_layout(s: StrategySection, cluster: ClusterSpec, framework: Framework) -> ParallelPlan:
    """Degrees that multiply to the number of GPUs; an open dp takes what the others leave."""
    tp, pp, cp = s.tp or 1, s.pp or 1, s.cp or 1
    gpus = cluster.gpus
    model_parallel = tp * pp * cp
    if gpus % model_parallel:
        raise SpecError(
            f"tp {tp} x pp {pp} x cp {cp} = {model_parallel} does not divide {gpus} GPUs", "strategy", _divisors_near(gpus, model_parallel)
        )
    dp = s.dp or _product(s.dp_replicate, s.dp_shard) or gpus // model_parallel
    if dp * model_parallel != gpus:
        raise SpecError(
            f"dp {dp} x tp {tp} x pp {pp} x cp {cp} = {dp * model_parallel}, but the cluster has {gpus} GPUs",
            "strategy.dp",
            [gpus // model_parallel],
        )
    virtual_stages = s.virtual_stages or _chunks(s.schedule, pp)
    structure = resolve_structure(s, framework, tp, virtual_stages)
    shards = s.dp_shard or (dp // s.dp_replicate if s.dp_replicate else (1 if structure.sharding == "none" else dp))
    if shards < 1 or dp % shards or (s.dp_replicate and s.dp_replicate * shards != dp):
        raise SpecError(
            f"dp_replicate {s.dp_replicate or '?'} x dp_shard {shards} is not dp {dp}", "strategy.dp_shard", _divisors_near(dp, shards)
        )
    return ParallelPlan(
        structure,
        dp_replicate=dp // shards,
        dp_shard=shards,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=s.ep or 1,
        etp=s.etp or 1,
        virtual_stages=virtual_stages,
        micro_batch_size=s.micro_batch_size or 1,
    )


def _chunks(schedule: str | None, pp: int) -> int:
    """Virtual stages that nobody said: as many as the schedule cannot do without."""
    if schedule is None or pp == 1:
        return 1
    return int(SCHEDULES.get_or_raise(schedule, "strategy.schedule").default_chunks)


def accumulation_steps(job: TrainingJob, plan: ParallelPlan) -> int:
    """Micro-batches of a replica in a step: global batch / (dp x micro-batch), a whole number."""
    per_step = plan.dp * plan.micro_batch_size
    if job.global_batch_size % per_step:
        below = max(1, job.global_batch_size // per_step) * per_step
        raise SpecError(
            f"{job.global_batch_size} sequences do not divide over dp {plan.dp} x micro-batch {plan.micro_batch_size}",
            "training.global_batch_size",
            [below, below + per_step],
        )
    return job.global_batch_size // per_step


def _divisors_near(total: int, wanted: int, count: int = 3) -> list[int]:
    divisors = [d for d in range(1, min(total, 100_000) + 1) if total % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:count])


def filled_spec(spec: RunSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan) -> dict[str, Any]:
    """The run spec of contract section 1 with every field filled: valid input again."""
    s = plan.structure
    training = {k: _plain(v) for k, v in vars(job).items()}
    strategy = {k: _plain(v) for k, v in vars(s).items()}
    strategy |= {
        k: getattr(plan, k) for k in ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "virtual_stages", "micro_batch_size")
    }
    strategy["options"] = dict(s.options)
    if job.method == "full":
        for name in ("lora_rank", "lora_targets"):
            training.pop(name)
    clusters = {
        "gpu": cluster.gpu.id if isinstance(spec.cluster.gpu, str) else _plain(spec.cluster.gpu),
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "network_gbps_per_gpu": cluster.network_bytes_per_s * 8 / 1e9,
        "network_latency_us": None if cluster.network_latency_s is None else cluster.network_latency_s * 1e6,
        "memory_margin": cluster.memory_margin,
        "scaleup_gpus": cluster.scaleup_gpus,
        "host_memory_gb": cluster.host_memory_bytes / 1e9 if cluster.host_memory_bytes else None,
        "nvme_tb": cluster.nvme_bytes / 1e12 if cluster.nvme_bytes else None,
        "usd_per_gpu_hour": cluster.usd_per_gpu_hour,
    }
    drop = {k: v for k, v in clusters.items() if v is not None}
    return {
        "model": _plain(spec.model),
        "cluster": drop,
        "training": {k: v for k, v in training.items() if v is not None},
        "strategy": {k: v for k, v in strategy.items() if v is not None and not (k == "recompute_modules" and not v)},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
