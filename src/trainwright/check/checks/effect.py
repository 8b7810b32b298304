"""K33, K39: options without effect; GPUs that an inference engine keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import View, as_number, truthy, whole
from ._tools import ERROR, HF, NOTE, WARNING, degree, drop, said, world


def effects(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        yield from _alone(setup, view)
        yield from _unused(view)
        yield from _dropped(setup, view)


def _dropped(setup: Setup, view: View) -> Iterator[Finding]:
    """Options that ``accelerate launch`` hands on to DeepSpeed and to nothing else (1.15, utils/launch.py)."""
    if view.format != "accelerate" or view.document.syntax != "shell" or setup.value("strategy.framework") not in ("fsdp1", "fsdp2", "ddp"):
        return
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = view.get(name)
        if key is not None and as_number(key.value) != 1:
            instead = "export ACCELERATE_GRADIENT_ACCUMULATION_STEPS instead" if name.endswith("steps") else "clip in the program"
            what = f"accelerate launch hands --{name} on to DeepSpeed only: without DeepSpeed it has no effect."
            yield said(view, key, "K33", WARNING, what, f"Remove it; {instead}, or give it to Accelerator().", drop(view, key))


def _alone(setup: Setup, view: View) -> Iterator[Finding]:
    """An option of an axis that has one rank."""
    tp, pp = degree(setup, "tp"), degree(setup, "pp")
    parallel = view.get("sequence_parallel")
    known_tp = setup.fact("strategy.tp") is not None
    if parallel is not None and truthy(parallel.value) and known_tp and tp == 1 and view.format not in ("axolotl",):
        yield said(
            view, parallel, "K33", NOTE, "sequence_parallel has no effect at tensor parallelism 1.", "Remove it.", drop(view, parallel)
        )
    virtual = view.get("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    if virtual is not None and (whole(virtual.value) or 1) > 1 and setup.fact("strategy.pp") is not None and pp == 1:
        yield said(
            view, virtual, "K33", NOTE, f"{virtual.path[-1]} has no effect without pipeline stages.", "Remove it.", drop(view, virtual)
        )
    tied = view.get("tp_comm_overlap", "enable_async_tensor_parallel")
    if tied is not None and truthy(tied.value) and known_tp and tp == 1:
        yield said(view, tied, "K33", NOTE, f"{tied.path[-1]} has no effect at tensor parallelism 1.", "Remove it.", drop(view, tied))
    number = view.get("recompute_num_layers", "recompute_method")
    granularity = view.get("recompute_granularity")
    if (
        view.format == "megatron"
        and number is not None
        and granularity is not None
        and str(granularity.value) == "selective"
        and number.value not in (None, "null")
    ):
        yield said(view, number, "K33", NOTE, f"{number.path[-1]} is read with full recomputation only.", "Remove it.", drop(view, number))


def _unused(view: View) -> Iterator[Finding]:
    if view.format == "accelerate":
        downcast = view.get("downcast_bf16")
        if downcast is not None and truthy(downcast.value):
            yield said(view, downcast, "K33", NOTE, "downcast_bf16 is a TPU option: it has no effect on GPUs.", "Set it to 'no'.")
        policy, least = view.get("fsdp_auto_wrap_policy"), view.get("fsdp_min_num_params")
        if policy is not None and least is not None and "TRANSFORMER" in str(policy.value).upper():
            yield said(view, least, "K33", NOTE, "fsdp_min_num_params is read by SIZE_BASED_WRAP only.", "Remove it.", drop(view, least))
        layer = view.get("fsdp_transformer_layer_cls_to_wrap")
        if policy is not None and layer is not None and layer.value and "SIZE" in str(policy.value).upper():
            yield said(
                view,
                layer,
                "K33",
                NOTE,
                "fsdp_transformer_layer_cls_to_wrap is read by TRANSFORMER_BASED_WRAP only.",
                "Remove it.",
                drop(view, layer),
            )
        kind = str(view.value("distributed_type") or "").upper()
        for block, needs in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED"), ("megatron_lm_config", "MEGATRON_LM")):
            key = view.get(block)
            if key is not None and key.value and kind and kind != needs:
                yield said(
                    view,
                    key,
                    "K33",
                    WARNING if kind != "NO" else NOTE,
                    f"{block} has no effect: distributed_type is {kind}.",
                    f"distributed_type: {needs}.",
                )
    if view.format in HF:
        evals, size = view.get("eval_steps", "evals_per_epoch"), view.get("val_set_size", "val_size")
        if (
            evals is not None
            and size is not None
            and as_number(size.value) == 0.0
            and view.get("eval_dataset", "test_datasets") is None
            and as_number(evals.value)
        ):
            yield said(
                view,
                evals,
                "K33",
                NOTE,
                f"{evals.path[-1]} has no effect: no data is kept for evaluation.",
                "Remove it, or keep some data.",
            )
        warm, kind_key = view.get("warmup_ratio"), view.get("lr_scheduler_type", "lr_scheduler")
        if warm is not None and as_number(warm.value) and kind_key is not None and str(kind_key.value) == "constant":
            yield said(view, warm, "K33", NOTE, "A constant schedule has no warm-up: warmup_ratio has no effect.", "constant_with_warmup.")


# What takes GPUs of the run for generation: (its GPUs, the trainer's GPUs).
def engines(setup: Setup) -> Iterator[Finding]:
    total = world(setup)
    for view in setup.seen():
        yield from _vllm(setup, view, total)
        if view.document.syntax == "shell" and view.document.parent is None:
            yield from _server(view)


def _vllm(setup: Setup, view: View, total: int | None) -> Iterator[Finding]:
    on, mode = view.get("use_vllm"), str(view.value("vllm_mode") or "").lower()
    share = view.get("vllm_gpu_memory_utilization", "gpu_memory_utilization")
    number = as_number(share.value) if share else None
    if on is not None and truthy(on.value) and mode == "colocate" and share is not None and number is not None and number > 0.6:
        yield said(
            view,
            share,
            "K39",
            WARNING,
            f"vLLM takes {number:.0%} of every GPU that trains as well: states and activations share the rest.",
            "0.3 to 0.5 where they share.",
        )
    actor, engines_, colocated = (view.get(n) for n in ("actor_num_gpus_per_node", "vllm_num_engines", "colocate_all_models"))
    count, width = (whole(engines_.value) if engines_ else None), whole(view.value("vllm_tensor_parallel_size")) or 1
    if actor and engines_ and count and whole(actor.value) and not (colocated and truthy(colocated.value)) and total:
        need = (whole(actor.value) or 0) * (whole(view.value("actor_num_nodes")) or 1) + count * width
        if need > total:
            yield said(
                view,
                engines_,
                "K39",
                ERROR,
                f"Actor and {count} vLLM engines of {width} GPUs need {need} GPUs, {total} are there: they are counted twice.",
                "Lower one, or colocate them.",
            )


def _server(view: View) -> Iterator[Finding]:
    """A script whose server and trainer see the same GPUs."""
    seen: dict[str, int] = {}
    for number, line in enumerate(view.document.text.splitlines(), 1):
        hit = re.search(r"CUDA_VISIBLE_DEVICES=[\"']?([\d,]+)", line)
        if line.lstrip().startswith("#") or hit is None:
            continue
        serve = bool(re.search(r"vllm[- ]serve|vllm serve|sglang", line))
        for gpu in hit.group(1).split(","):
            kind = "serve" if serve else "train"
            other = "train" if serve else "serve"
            if f"{other}{gpu}" in seen:
                from ..setup import Place

                yield Finding(
                    "K39",
                    ERROR,
                    Place(view.document.name, number),
                    f"GPU {gpu} is given to the server and to the trainer (line {seen[f'{other}{gpu}']}).",
                    "Give them different GPUs.",
                )
                return
            seen[f"{kind}{gpu}"] = number


CHECK = (
    Check(
        "K33", "options without effect", effects,
        Example({"acc.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\ndowncast_bf16: true\nfsdp_config:\n  "
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_sharding_strategy: FULL_SHARD\n"
                 "machine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"}),
        "note; warning where the option is a whole strategy", "options of a feature that is switched off on purpose",
    ),
    Check(
        "K39", "GPUs of an inference engine are not counted twice", engines,
        Example({"grpo.sh": "#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model gpt2 &\nCUDA_VISIBLE_DEVICES=3,4,5,6 torchrun "
            "--nproc_per_node 4 grpo.py --model_name_or_path gpt2 "
                 "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-6 --output_dir out --use_vllm True\n"}),
        "error where a GPU has two owners; warning where a shared one is nearly full",
    ),
)  # fmt: skip
