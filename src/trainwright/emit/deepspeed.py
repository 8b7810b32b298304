"""DeepSpeed: ``ds_config.json`` for ZeRO 0 to 3, offload to host memory and NVMe, pipeline stages, AutoTP, Ulysses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..frameworks.dtypes import of_one_type
from ..resolve import Run
from ..spec.precision import activation_dtype
from .base import Changes, Files, Limit, Options, Setting, Target, only, said, table, when, whole
from .common import nothing_but_full_precision, options_among, plain_layers
from .environment import settings
from .launch import Program, launched, script
from .rate import deepspeed_scheduler, rate_of

CONFIG = "ds_config.json"
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion"}
# DeepSpeed's own AdamW is compiled (FusedAdam, DeepSpeedCPUAdam beside the host's memory); ``torch_adam`` takes PyTorch's.
KERNELS: dict[str, dict[str, Any]] = {
    "fused": {},
    "foreach": {"torch_adam": True, "foreach": True},
    "for-loop": {"torch_adam": True, "foreach": False},
}
DEVICES = {"optimizer-cpu": "cpu", "params-cpu": "cpu", "optimizer-nvme": "nvme", "params-nvme": "nvme"}
DEFAULT_BUCKET = 500_000_000  # elements: reduce_bucket_size and allgather_bucket_size
AIO = {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 4, "single_submit": False, "overlap_events": True}
ALIGNMENT = 1024  # elements: the swapper rounds buffers up to whole blocks of the asynchronous I/O
OFFLOADED_STATES = {"adamw": 4, "lion": 3}  # parameter, gradient and states of one element that are swapped together


def worked_out(run: Run) -> Changes:
    """Bucket sizes that follow from the model, in elements.

    * ZeRO-3 gathers and reduces a layer at a time: a bucket of one layer's largest matrix keeps a message whole, a larger one only costs memory;
      the prefetch bucket is nine tenths of it (so that it never waits for the next layer's last tensor), tensors up to ten rows of the model stay
      whole (norms and biases, whose gathers would be all latency). These are the proportions of Hugging Face's integration (h^2, 0.9 h^2, 10 h).
    * ZeRO-1 and 2 reduce behind the backward pass: a bucket of one layer, at most DeepSpeed's default, begins the traffic after the first layer.
    * With NVMe the optimizer's sub-groups are what one pinned buffer holds: an eighth of a rank's share, between 1e7 and 1e9.
    """
    s, model = run.plan.structure, run.model
    if s.sharding == "none":
        return {}
    layer = max((block.parameters for block, _ in model.counts), default=0)
    sizes: dict[str, Any] = {"overlap_comm": True}
    if s.sharding == "zero3":
        square = max(model.hidden**2, 10**6)
        sizes["reduce_bucket_size"] = min(DEFAULT_BUCKET, square)
        sizes["stage3_prefetch_bucket_size"] = min(DEFAULT_BUCKET, square * 9 // 10)
        sizes["stage3_param_persistence_threshold"] = 10 * model.hidden
        if s.offload.endswith("-nvme"):
            share = model.parameters // max(1, run.plan.dp_shard)
            sizes["sub_group_size"] = max(10**7, min(10**9, share // 8))
    else:
        bucket = max(10**6, min(DEFAULT_BUCKET, layer // max(1, run.plan.tp)))
        sizes |= {"reduce_bucket_size": bucket, "allgather_bucket_size": DEFAULT_BUCKET}
    return sizes


def config(run: Run, options: Options) -> dict[str, Any]:
    """The JSON document."""
    plan, job, s = run.plan, run.job, run.plan.structure
    document: dict[str, Any] = {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": options.clip,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    if job.precision in ("bf16", "fp16"):
        document[job.precision] = {"enabled": True}
    if job.precision == "fp16":
        document["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    document["data_types"] = {"grad_accum_dtype": job.gradient_dtype}
    document["optimizer"] = {
        "type": OPTIMIZERS[job.optimizer],
        "params": {"lr": options.learning_rate, "betas": list(options.betas), "weight_decay": options.weight_decay}
        | ({"eps": options.eps} | KERNELS[job.optimizer_kernel] if job.optimizer == "adamw" else {}),
    }
    scheduler = deepspeed_scheduler(rate_of(run, options, "constant"))
    if scheduler is not None:
        document["scheduler"] = scheduler
    document["zero_optimization"] = _zero(run, options)
    if s.offload.endswith("-nvme"):
        document["aio"] = dict(AIO)
    if plan.pp > 1:
        document["pipeline"] = {"stages": plan.pp, "partition": "parameters"}
    if plan.tp > 1:
        document["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        document["sequence_parallel_size"] = plan.cp
    return document


def _zero(run: Run, options: Options) -> dict[str, Any]:
    s = run.plan.structure
    zero: dict[str, Any] = {"stage": STAGES[s.sharding], **dict(s.options)}
    if s.sharding == "zero3":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    device = DEVICES.get(s.offload)
    if device:
        zero["offload_optimizer"] = _offload(device, options) | {"buffer_count": OFFLOADED_STATES[run.job.optimizer]}
    if s.offload.startswith("params-"):
        zero["offload_param"] = _offload(device or "cpu", options)
        if device == "nvme":
            zero["offload_param"] |= {"buffer_count": 5, "buffer_size": parameter_buffer(run)}
    if device == "nvme":
        zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    return zero


def _offload(device: str, options: Options) -> dict[str, Any]:
    return {"device": device, "pin_memory": True} | ({"nvme_path": options.nvme_path} if device == "nvme" else {})


def parameter_buffer(run: Run) -> int:
    """Elements of one swap buffer: the largest tensor's share of a rank, in whole aligned blocks (a larger tensor ends in an assertion)."""
    blocks = [run.model.embedding, run.model.head, *(b for b, _ in run.model.counts)]
    largest = max(w.elements for b in blocks for w in b.weights)
    share = -(-largest // run.plan.dp_shard)
    return -(-share // ALIGNMENT) * ALIGNMENT


def program(run: Run, options: Options) -> Program:
    return Program((options.script,), (("--deepspeed", True), ("--deepspeed_config", CONFIG)))


def write(run: Run, options: Options) -> Files:
    return {
        CONFIG: json.dumps(config(run, options), indent=2) + "\n",
        "launch.sh": script(run, options, program(run, options), settings(run, TARGET, options)),
    }


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A ``ds_config.json``: known by its ZeRO block or its batch keys."""
    try:
        document = json.loads(files.get(CONFIG, ""))
    except ValueError:
        return None
    if not isinstance(document, dict) or not {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & document.keys():
        return None
    return said(launched(files) | _fields(document))


def _fields(document: dict[str, Any]) -> dict[str, Any]:
    zero = table(document.get("zero_optimization"))
    batch, micro = whole(document.get("train_batch_size")), whole(document.get("train_micro_batch_size_per_gpu"))
    accumulation = whole(document.get("gradient_accumulation_steps", 1))
    sharding = {v: k for k, v in STAGES.items()}.get(zero.get("stage", 0)) if isinstance(zero.get("stage", 0), int) else None
    known = batch and micro and accumulation and batch % (micro * accumulation) == 0
    dp = batch // (micro * accumulation) if known else None
    optimizer = table(document.get("optimizer"))
    kind, kernel = str(optimizer.get("type", "")).lower(), table(optimizer.get("params"))
    cp = whole(document.get("sequence_parallel_size"), 1)
    enabled = [p for p in ("bf16", "fp16") if table(document.get(p)).get("enabled") is True]
    return {
        "strategy.framework": "deepspeed",
        "strategy.sharding": sharding,
        "strategy.dp": dp,
        "strategy.dp_shard": 1 if sharding == "none" else dp,
        "strategy.dp_replicate": dp if sharding == "none" else 1,
        "strategy.tp": whole(table(document.get("tensor_parallel")).get("autotp_size"), 1),
        "strategy.pp": whole(table(document.get("pipeline")).get("stages"), 1),
        "strategy.cp": cp,
        "strategy.cp_kind": "ulysses" if cp > 1 else None,
        "strategy.micro_batch_size": micro,
        "strategy.offload": _read_offload(zero),
        "strategy.options": {k: v for k, v in zero.items() if k not in _STRUCTURAL},
        "training.global_batch_size": batch,
        "training.precision": enabled[0] if enabled else "fp32",
        "training.gradient_dtype": table(document.get("data_types")).get("grad_accum_dtype"),
        "training.optimizer": {v.lower(): k for k, v in OPTIMIZERS.items()}.get(kind),
        "training.optimizer_kernel": ("foreach" if kernel.get("foreach") else "for-loop") if kernel.get("torch_adam") is True else "fused",
    }


# What `strategy.options` may hold: keys of zero_optimization that DeepSpeed knows (it refuses others) and that say nothing else of the plan.
ZERO_KEYS = (
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size",
    "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear",
    "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "compute_grad_norm",
)  # fmt: skip
_STRUCTURAL = ("stage", "offload_optimizer", "offload_param", "stage3_gather_16bit_weights_on_model_save")


def _read_offload(zero: dict[str, Any]) -> str:
    for key, word in (("offload_param", "params"), ("offload_optimizer", "optimizer")):
        device = table(zero.get(key)).get("device", "none")
        if device in ("cpu", "nvme"):
            return f"{word}-{device}"
    return "none"


def _adam_on_cpu(run: Run) -> list[Setting]:
    if run.plan.structure.offload == "none":
        return []
    return [
        Setting(
            "DS_SKIP_CUDA_CHECK",
            "1",
            "DeepSpeedCPUAdam is compiled on first use: a toolkit of another minor version than torch's would refuse",
        )
    ]


def _heads_divide(run: Run) -> bool:
    """Ulysses gives each rank whole heads."""
    ranks = run.plan.cp * run.plan.tp
    return run.model.heads % ranks == 0 and run.model.kv_heads % ranks == 0


def _zero3_for_nvme(run: Run) -> bool:
    return run.plan.structure.offload not in ("params-cpu", "optimizer-nvme", "params-nvme") or run.plan.structure.sharding == "zero3"


LIMITS = (
    only("strategy.framework", ["deepspeed"], "configures DeepSpeed and nothing else"),
    only("strategy.schedule", ["1f1b"], "has one pipeline schedule"),
    only("strategy.virtual_stages", [1], "has one chunk a pipeline stage"),
    when(
        lambda run: run.plan.structure.sharding != "none",
        Limit(
            "strategy.dp_replicate",
            lambda run: run.plan.dp_replicate == 1,
            "shards over all data-parallel ranks",
            lambda run: {"strategy.dp_replicate": 1},
        ),
    ),
    Limit(
        "strategy.cp_kind",
        lambda run: run.plan.cp == 1 or run.plan.structure.cp_kind == "ulysses",
        "splits sequences by Ulysses' all-to-all",
        lambda run: {"strategy.cp_kind": "ulysses"} if _heads_divide(run) else {"strategy.cp": 1},
    ),
    only("training.precision", ["bf16", "fp16", "fp32"], "has no key for this format"),
    when(
        lambda run: run.plan.structure.sharding == "none",
        Limit(
            "training.gradient_dtype",
            lambda run: of_one_type(run.job),
            "adds up gradients in another type than the weights' with ZeRO alone",
            lambda run: {"training.gradient_dtype": activation_dtype(run.job.precision)},
        ),
    ),
    nothing_but_full_precision("keeps fp32 masters beside 16-bit weights"),
    only("training.optimizer", list(OPTIMIZERS), "builds AdamW and Lion itself"),
    when(lambda run: run.job.optimizer != "adamw", only("training.optimizer_kernel", ["fused"], "steps with its own kernels")),
    only("training.autocast", [False], "casts the weights itself"),
    only("training.optimizer_in_backward", [False], "steps after backward"),
    only("strategy.offload", ["none", *DEVICES], "offloads activations only through its own checkpoint function, in code"),
    Limit(
        "strategy.offload",
        _zero3_for_nvme,
        "moves parameters, and anything to NVMe, at ZeRO-3 only",
        lambda run: {"strategy.sharding": "zero3"} if run.plan.pp == 1 else {"strategy.offload": "none"},
    ),
    options_among(ZERO_KEYS, "knows no such key of zero_optimization"),
    *plain_layers("runs kernels one by one"),
)
TARGET = Target(
    name="deepspeed",
    title="DeepSpeed",
    write=write,
    read=read,
    limits=LIMITS,
    says=(
        "cluster.nodes", "cluster.gpus_per_node",
        "strategy.framework", "strategy.sharding", "strategy.dp", "strategy.dp_shard", "strategy.dp_replicate", "strategy.tp", "strategy.pp", "strategy.cp",
        "strategy.micro_batch_size", "strategy.offload", "strategy.options",
        "training.global_batch_size", "training.precision", "training.gradient_dtype", "training.optimizer",
        "training.optimizer_kernel",
    ),
    leaves=(
        "training.seq_len", "training.tokens", "training.dropout", "training.packing", "training.moe_capacity_factor", "training.loss", "training.loss_chunks",
        "training.method", "training.lora_rank", "training.lora_targets", "training.base_quantization",
        "strategy.ep", "strategy.etp", "strategy.sequence_parallel", "strategy.recompute", "strategy.recompute_every", "strategy.recompute_modules",
        "strategy.attention", "strategy.reshard_root", "strategy.compile", "strategy.layers_per_stage",
    ),
    install=lambda run, options: "`pip install torch deepspeed==0.19.8`",
    command=lambda run, options: "`bash launch.sh`" + (" on every node, HEAD_NODE set to the first" if run.cluster.nodes > 1 else ""),
    program=program,
    settings=_adam_on_cpu,
    settle=worked_out,
    source="deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/swap_tensor",
)  # fmt: skip
__all__ = ["TARGET", "config"]
