"""K05, K26, K34, K36, K37: what a DeepSpeed block says against its ZeRO stage, and numbers in it that cannot be meant."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import View, as_number, whole
from ._tools import ERROR, NOTE, WARNING, drop, put, said

DEEPSPEED = ("deepspeed", "accelerate", "gpt_neox", "megatron")
STAGE3_ONLY = (
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "gather_16bit_weights_on_model_save", "zero3_save_16bit_model", "sub_group_size", "memory_efficient_linear",
)  # fmt: skip
# Keys that transformers.integrations.deepspeed fills under "auto" (trainer_config_process, trainer_config_finalize).
FILLED = frozenset((
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping", "optimizer.params.lr",
    "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled",
    "bfloat16.enabled", "fp16.auto_cast", "fp16.opt_level", "amp.enabled", "amp.opt_level", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold", "checkpoint.use_node_local_storage",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
))  # fmt: skip


def stage_of(view: View) -> int | None:
    """The ZeRO stage of one file; None where it is not said."""
    found = as_number(view.value("zero_optimization.stage", "zero_stage"))
    return int(found) if found is not None else None


def stages(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen(*DEEPSPEED):
        stage = stage_of(view)
        if stage is None or stage >= 3:
            continue
        device = view.get("offload_param.device", "offload_param_device")
        if device is not None and device.value is not None:
            live = str(device.value).lower() not in ("none", "null", "")
            whole_block = device._replace(path=device.path[:-1]) if device.path[-1] == "device" else device
            yield said(
                view, whole_block, "K05", WARNING if live else NOTE,
                f"Parameters are offloaded at stage 3 only; at stage {stage} they are not partitioned and offload_param does nothing.",
                "Remove it, or use stage 3." if not live else "Remove it, use stage 3, or offload the optimizer (offload_optimizer).",
                drop(view, whole_block),
            )  # fmt: skip
        init = view.get("zero3_init_flag")
        if init is not None and view.on("zero3_init_flag"):
            yield said(
                view, init, "K05", WARNING, f"zero3_init_flag is on at stage {stage}: it partitions parameters while they are built, which "
                    f"only stage 3 can gather again.",
                "Set it to false.", put(view, init, False),
            )  # fmt: skip
        for name in STAGE3_ONLY:
            key = view.get(name)
            if key is not None and (name.startswith("stage3_") or name.startswith("zero3_")) and key.value not in (None, False, "false"):
                yield said(
                    view, key, "K05", NOTE, f"{key.path[-1]} is read at stage 3 only; the stage is {stage}.", "Remove it.", drop(view, key)
                )


def automatic(setup: Setup) -> Iterator[Finding]:
    """ "auto" that nobody fills."""
    trainer = any(True for _ in setup.seen("trainer", "trl", "llama_factory", "axolotl"))
    for view in setup.seen("deepspeed"):
        for key in view.all(*(_last(view))):
            if key.value != "auto":
                continue
            name = ".".join(str(p) for p in key.path)
            if name not in FILLED:
                yield said(
                    view, key, "K26", WARNING, f'"auto" for {name}: no Trainer fills this key, and DeepSpeed takes its default in silence.',
                    "Remove the key, or give a number.", drop(view, key),
                )  # fmt: skip
            elif len(key.path) == 1 and not trainer and _raw_launch(setup):
                yield said(
                    view, key, "K26", ERROR, f'"auto" for {name}, but the program that is started is no Hugging Face Trainer: DeepSpeed ends in a TypeError.',
                    "Give a number.",
                )  # fmt: skip


def _last(view: View) -> set[str]:
    found: set[str] = set()
    stack = [view.document.data]
    while stack:
        data = stack.pop()
        if isinstance(data, dict):
            found |= {str(k) for k, v in data.items() if v == "auto"}
            stack += [v for v in data.values() if isinstance(v, dict)]
    return found


def _raw_launch(setup: Setup) -> bool:
    """A program was named that passes a DeepSpeed file by itself: Megatron-DeepSpeed's --deepspeed_config."""
    return any(v.get("deepspeed_config") is not None and v.format == "megatron" for v in setup.views)


def hierarchy(setup: Setup) -> Iterator[Finding]:
    per_node = whole(setup.value("launch.gpus_per_node"))
    for view in setup.seen(*DEEPSPEED):
        key = view.get("zero_hpz_partition_size")
        size = whole(key.value) if key else None
        if key is None or not size or size == 1:
            continue
        stage = stage_of(view)
        if stage is not None and stage < 3:
            yield said(
                view,
                key,
                "K34",
                WARNING,
                f"zero_hpz_partition_size is read at stage 3 only; the stage is {stage}.",
                "Remove it.",
                drop(view, key),
            )
        elif per_node and size != per_node:
            yield said(
                view, key, "K34", ERROR if per_node % size else WARNING,
                f"The secondary partition spans {size} ranks, a node has {per_node}: gathers in backward leave the node or waste memory.",
                f"Set it to {per_node}.", put(view, key, per_node),
            )  # fmt: skip


def disk(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen(*DEEPSPEED):
        for block in ("offload_optimizer", "offload_param"):
            key = view.get(f"{block}.device", f"{block}_device")
            if key is None or str(key.value).lower() != "nvme":
                continue
            path = view.value(f"{block}.nvme_path", f"{block}_nvme_path", "nvme_path")
            if not path or (str(path).lower() in ("none", "null", "auto") and view.format != "accelerate"):
                yield said(
                    view, key, "K36", ERROR, f"{block} goes to NVMe, but no nvme_path is given.", "Add nvme_path, a folder on a local disk."
                )
            elif str(path).startswith(("/tmp", "/dev/shm")) or (
                "nvme" not in str(path).lower() and str(path).startswith(("/home", "/mnt/nfs", "/nfs"))
            ):
                yield said(
                    view,
                    key,
                    "K36",
                    WARNING,
                    f"nvme_path {path} is usually no local NVMe disk: the step waits for it.",
                    "Point it at the node's own NVMe disk.",
                )
            if view.format == "deepspeed" and view.get("aio") is None:
                yield said(
                    view, key, "K36", NOTE, "Offload to NVMe without an aio block: DeepSpeed's default queue (8 deep, one thread) leaves "
                        "most of the disk idle.",
                    'Add "aio": {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 4, "overlap_events": true}.',
                )  # fmt: skip


# (key, least, most, what happens beyond): elements for buckets. DeepSpeed's own defaults lie between.
SIZES = (
    ("reduce_bucket_size", 1e5, 2e9, "4 bytes an element are held beside the model"),
    ("allgather_bucket_size", 1e5, 4e9, "2 bytes an element are held beside the model"),
    ("stage3_prefetch_bucket_size", 0, 2e9, "as many elements are gathered ahead of use"),
    ("stage3_param_persistence_threshold", 0, 1e7, "almost every tensor stays whole on every GPU, which is no partitioning"),
    ("stage3_max_live_parameters", 1e6, 1e13, ""),
    ("sub_group_size", 1e6, 1e14, ""),
)


def sizes(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen(*DEEPSPEED):
        for name, least, most, why in SIZES:
            key = view.get(name)
            value = as_number(key.value) if key else None
            if key is None or value is None:
                continue
            if value > most:
                yield said(
                    view,
                    key,
                    "K37",
                    WARNING,
                    f"{name} {value:g} is far above what is meant ({most:g} at most)" + (f": {why}." if why else "."),
                    f"Use {min(most, 5e8):g} or less.",
                )
            elif value < least:
                yield said(
                    view,
                    key,
                    "K37",
                    WARNING,
                    f"{name} {value:g} is far below what is meant: every message becomes latency.",
                    f"Use {least:g} or more.",
                )
        power, scale = view.get("initial_scale_power"), view.get("fp16.loss_scale", "loss_scale")
        number = as_number(power.value) if power else None
        if power and number is not None and number > 24 and view.value("fp16.enabled") not in (False, "false"):
            yield said(
                view, power, "K37", NOTE, f"initial_scale_power {number:g}: the loss scale begins at 2^{number:g}, and about {number - 16:g} "
                    f"steps are skipped until it has come down.",
                "16 is DeepSpeed's default.", put(view, power, 16),
            )  # fmt: skip
        fixed = as_number(scale.value) if scale else None
        if scale and fixed is not None and 0 < fixed < 128 and view.on("fp16.enabled", "fp16"):
            yield said(
                view, scale, "K37", WARNING,
                f"loss_scale {fixed:g} is a fixed scale, so small that fp16 gradients vanish; 0 means dynamic (12 is a power, not a scale).",
                "Set it to 0.", put(view, scale, 0),
            )  # fmt: skip


def _file(body: str) -> Example:
    return Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n' + body + "\n}\n"})


CHECK = (
    Check(
        "K05", "settings of another ZeRO stage", stages,
        _file('  "zero_optimization": {\n    "stage": 2,\n    "offload_param": {"device": "cpu"}\n  }'),
        "warning where something asked for does not happen; note where a key is merely not read",
    ),
    Check(
        "K26", '"auto" that nobody fills', automatic, _file('  "zero_optimization": {\n    "stage": 3,\n    "sub_group_size": "auto"\n  }'),
        "warning for a key that no Trainer fills; error where no Trainer is started at all", "fp16 auto beside bf16 auto under a Trainer",
    ),
    Check(
        "K34", "hierarchical partition spans a node", hierarchy,
        Example(
            {"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}\n}\n'},
            launch="torchrun --nnodes 4 --nproc_per_node 8 train.py --deepspeed ds_config.json",
        ),
        "error where it does not divide the node; warning where it is another size or the stage is not 3",
    ),
    Check(
        "K36", "NVMe offload has a path and an aio block", disk,
        _file('  "zero_optimization": {\n    "stage": 3,\n    "offload_optimizer": {"device": "nvme"}\n  }'),
        "error without a path; warning for a path that is no local disk; note without aio",
    ),
    Check(
        "K37", "buckets, thresholds and loss scales of a plausible size", sizes,
        _file('  "zero_optimization": {\n    "stage": 3,\n    "stage3_param_persistence_threshold": 1e8\n  }'),
        "warning; note for a loss scale that only costs its first steps",
    ),
)  # fmt: skip
