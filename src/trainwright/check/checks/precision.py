"""K06, K31: one precision across files, and one that the hardware has."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import Value, View, truthy
from ._tools import ERROR, NOTE, WARNING, put, said

HALF = {
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
}
FULL = {"float32": "fp32", "fp32": "fp32", "no": "fp32", "32": "fp32", "32-true": "fp32"}
BF16_FAMILIES = (
    "qwen2",
    "qwen3",
    "qwen2.5",
    "llama-3",
    "llama3",
    "gemma",
    "mistral",
    "mixtral",
    "deepseek",
    "gpt-oss",
    "phi-3",
    "phi-4",
    "olmo-2",
)


def compute(view: View) -> tuple[str, Value] | None:
    """The type that one file asks products to run in, with its key."""
    for flag in ("bf16", "fp16"):
        for name in (flag, f"{flag}.enabled"):
            key = view.get(name)
            if key is not None and not isinstance(key.value, dict) and truthy(key.value):
                return flag, key
    key = view.get("mixed_precision")
    if key is not None and str(key.value).lower() in {**HALF, **FULL}:
        return {**HALF, **FULL}[str(key.value).lower()], key
    return None


def weights(view: View) -> tuple[str, Value] | None:
    """The type that one file loads weights in."""
    key = view.get("torch_dtype", "dtype") if view.format in ("trainer", "trl", "automodel") else None
    name = str(key.value).removeprefix("torch.").lower() if key else ""
    return (HALF[name], key) if key is not None and name in HALF else None


def one(setup: Setup) -> Iterator[Finding]:
    views = [v for v in setup.views if v.format != "megatron"]
    found = [(v, c) for v in views if (c := compute(v)) is not None]
    for view, (kind, key) in found[1:]:
        first, (other, other_key) = found[0]
        if kind != other and view is not first and "fp32" not in (kind, other):
            yield said(
                view, key, "K06", ERROR, f"{kind} here and {other} at {first.place(other_key)}: the engine refuses, or trains in the one that was not meant.",
                f"Say {other} in both.",
            )  # fmt: skip
        elif kind != other and view is not first:
            yield said(view, key, "K06", WARNING, f"{kind} here and {other} at {first.place(other_key)}.", f"Say {other} in both.")
    for view in views:
        yield from _inside(view)
    yield from _megatron(setup)


def _inside(view: View) -> Iterator[Finding]:
    """Two keys of one file, or one key against what stands beside it."""
    both = [k for f in ("fp16", "bf16") for k in [view.get(f)] if k is not None and not isinstance(k.value, dict) and truthy(k.value)]
    blocks = [k for f in ("fp16.enabled", "bf16.enabled", "bfloat16.enabled") for k in [view.get(f)] if k is not None and truthy(k.value)]
    if len(both) == 2 or len(blocks) == 2:
        yield said(
            view,
            (both if len(both) == 2 else blocks)[1],
            "K06",
            ERROR,
            "fp16 and bf16 are both on: the engine stops.",
            "Turn one of them off.",
        )
    run, held = compute(view), weights(view)
    if run and held and run[0] != held[0] and run[0] != "fp32" and not quantized_in_half(view):
        yield said(
            view, held[1], "K06", WARNING, f"Weights are loaded in {held[0]} while training runs in {run[0]}: every product converts, and "
                f"{'overflow' if held[0] == 'fp16' else 'rounding'} comes with it.",
            f"Load them in {run[0]}.", put(view, held[1], "bfloat16" if run[0] == "bf16" else "float16"),
        )  # fmt: skip
    if view.format == "accelerate" and run:
        yield from _accelerate(view, *run)


def _accelerate(view: View, kind: str, key: Value) -> Iterator[Finding]:
    file = view.get("deepspeed_config_file")
    if file is not None and file.value and kind == "fp32":
        yield said(
            view, key, "K06", WARNING, f"mixed_precision no, while {file.value} decides the precision: Accelerate refuses the pair where "
                f"that file says fp16 or bf16.",
            "Remove mixed_precision here, or say what that file says.",
        )  # fmt: skip
    elif kind == "fp16" and view.value("distributed_type") in ("FSDP", "MULTI_GPU", "DEEPSPEED"):
        yield said(
            view, key, "K06", NOTE, "fp16 here must be fp16 in the training arguments too; models published in bf16 overflow "
                "in it.", "bf16 on Ampere and later.",
            put(view, key, "bf16"),
        )  # fmt: skip


def _megatron(setup: Setup) -> Iterator[Finding]:
    """A Megatron script's flag against the DeepSpeed block inside it."""
    flags = [(v, c) for v in setup.seen("megatron") if (c := compute(v)) is not None]
    blocks = [(v, c) for v in setup.seen("deepspeed") if (c := compute(v)) is not None]
    for view, (kind, key) in flags:
        for other, (block, block_key) in blocks:
            if kind != block:
                yield said(
                    view,
                    key,
                    "K06",
                    ERROR,
                    f"--{kind} here and {block} in the DeepSpeed block ({other.place(block_key)}).",
                    f"Say {block} in both.",
                )


def quantized_in_half(view: View) -> bool:
    """A GPTQ or AWQ base, whose kernels demand fp16."""
    name = str(view.value("model_name_or_path", "base_model") or "").lower()
    return any(word in name for word in ("gptq", "awq", "int4", "int8")) or view.on("gptq")


OLD = ("v100", "t4", "p100", "p40", "rtx20", "2080", "titan-v", "volta", "turing")
NO_FP8 = (*OLD, "a100", "a40", "a6000", "a10", "3090", "a30", "ampere")


def hardware(setup: Setup) -> Iterator[Finding]:
    gpu, words = _gpu(setup)
    if not gpu:
        return
    for view in setup.views:
        run = compute(view)
        if run and run[0] == "bf16" and any(o in gpu for o in OLD):
            yield said(
                view,
                run[1],
                "K31",
                ERROR,
                f"bf16 on {words}: it has no bf16 units (Ampere and later do).",
                "Use fp16 with dynamic loss scaling.",
            )
        fp8 = view.get("fp8", "fp8_format", "fp8_recipe", "enable_fp8")
        if fp8 is not None and fp8.value not in (None, False, "false", "null", "none", "") and any(o in gpu for o in NO_FP8):
            yield said(view, fp8, "K31", ERROR, f"fp8 on {words}: Hopper, Ada and later have it.", "Use bf16.")
        flash = view.get("attn_implementation", "flash_attn", "flash_attention", "use_flash_attn")
        if (
            flash is not None
            and (str(flash.value).lower() in ("flash_attention_2", "fa2") or truthy(flash.value))
            and any(o in gpu for o in OLD)
        ):
            yield said(view, flash, "K31", ERROR, f"FlashAttention 2 on {words}: it needs Ampere.", "Use sdpa.")


def _gpu(setup: Setup) -> tuple[str, str]:
    """The GPU, as asked or as the files name it (an accelerator, a Slurm constraint)."""
    from ...errors import TrainwrightError
    from ...spec.run import parse_cluster

    on = setup.asked.get("on")
    if isinstance(on, str) and "x" in on:
        try:
            on = parse_cluster(on)
        except TrainwrightError:
            return "", ""
    name = str(on.get("gpu", "")) if isinstance(on, dict) else str(setup.value("cluster.gpu") or "")
    return name.lower(), name


CHECK = (
    Check(
        "K06", "one precision across weights, trainer, DeepSpeed and Accelerate", one,
        Example({"args.yaml": "model_name_or_path: mistralai/Mistral-7B-v0.1\ntorch_dtype: float16\nbf16: true\nper_device_train_batch_size: 4\n"
                 "gradient_accumulation_steps: 2\nlearning_rate: 2.0e-5\noutput_dir: out\nnum_train_epochs: 1\n"}),
        "error where two files or two switches contradict; warning where weights are held in another type; note for fp16 that others must repeat",
        "fp16 demanded by a GPTQ base; no mixed precision with FSDP and a quantized base; fp16 auto beside bf16 auto",
    ),
    Check(
        "K31", "the hardware has the precision and the kernel", hardware,
        Example({"args.yaml": "model_name_or_path: mistralai/Mistral-7B-v0.1\nbf16: true\nper_device_train_batch_size: 4\n"
                 "gradient_accumulation_steps: 2\nlearning_rate: 2.0e-5\noutput_dir: out\nnum_train_epochs: 1\n"}, on="8xV100-SXM2-32GB"),
        "error",
    ),
)  # fmt: skip
