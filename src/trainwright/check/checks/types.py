"""K27: values of the type that is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ..findings import Change, Check, Example, Finding
from ..setup import Setup
from ..view import View, as_number
from ._tools import ERROR, WARNING, put, said

# Keys that are numbers in every format that has them; their text forms that YAML 1.1 leaves as text are numbers all the same.
NUMBERS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "num_processes", "num_machines", "machine_rank",
    "per_device_train_batch_size", "learning_rate", "micro_batch_size", "sequence_len", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "hidden_size", "num_layers", "num_attention_heads", "lora_r", "lora_rank", "lora_alpha", "max_grad_norm",
    "reduce_bucket_size", "tp_size", "pp_size", "cp_size", "ep_size", "dp_replicate_size",
)  # fmt: skip


def types(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        if view.document.syntax == "shell":
            continue
        for name in NUMBERS:
            key = view.get(name)
            if key is None or (isinstance(key.value, (dict, list)) and name != "learning_rate") or not isinstance(key.value, (str, list)):
                continue
            text = str(key.value).strip()
            if isinstance(key.value, str) and (
                as_number(text) is not None
                or text.lower() in ("auto", "none", "null", "", "???", "~")
                or re.search(r"[${<%!]|^[A-Z_]+$|:", text)
            ):
                continue
            yield said(
                view,
                key,
                "K27",
                ERROR,
                f"{key.path[-1]} is {text[:40]!r}, a {'list' if isinstance(key.value, list) else 'text'}: a number is read here.",
                "Write a number.",
            )
        yield from _null_text(view)
        if view.format == "deepspeed":
            yield from _deepspeed_values(view)


# What DeepSpeed's own configuration classes take, or the word auto (runtime/config.py, runtime/zero/config.py of 0.19.8).
WHOLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler")


def _deepspeed_values(view: View) -> Iterator[Finding]:
    """Values of the right name that DeepSpeed refuses: stages that do not exist, counts that are none, words for switches."""
    data = view.document.data
    if not isinstance(data, dict):
        return
    wrong: list[tuple[tuple[str, ...], object, str]] = []
    wrong += [((n,), data[n], "a whole number above zero") for n in WHOLE if n in data and not _is_count(data[n])]
    wrong += [((n,), data[n], "a table") for n in SECTIONS if data.get(n) is not None and not isinstance(data[n], dict)]
    for name in ("fp16", "bf16"):
        section = data.get(name)
        if isinstance(section, dict) and str(section.get("enabled", False)).lower() not in ("true", "false", "auto", "0", "1"):
            wrong.append(((name, "enabled"), section["enabled"], "true or false"))
    zero = data.get("zero_optimization")
    if isinstance(zero, dict) and str(zero.get("stage", 0)) not in ("0", "1", "2", "3", "auto"):
        wrong.append((("zero_optimization", "stage"), zero["stage"], "0, 1, 2 or 3"))
    for path, value, wanted in wrong:
        if isinstance(value, str) and re.search(r"[${<%!]", value):  # a template's placeholder
            continue
        what = f"{'.'.join(path)} is {str(value)[:40]!r}: DeepSpeed takes {wanted}."
        yield Finding("K27", ERROR, view.place(path), what, f"Write {wanted}.")


def _is_count(value: object) -> bool:
    """Texts are the concern of `types`."""
    if isinstance(value, str):
        return True
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value > 0 and value == int(value)


NULLABLE = ("max_steps", "resume_from_checkpoint", "dataset_num_proc", "num_query_groups", "virtual_pipeline_model_parallel_size",
    "recompute_granularity", "main_process_ip",
            "activations_checkpoint_method", "resume_checkpoint_path", "dp_size", "ddp_find_unused_parameters", "main_process_port",
                "recompute_method", "recompute_num_layers")  # fmt: skip


def _null_text(view: View) -> Iterator[Finding]:
    """None written as text in YAML or JSON is the word, not the absence."""
    for name in NULLABLE:
        key = view.get(name)
        if key is not None and isinstance(key.value, str) and key.value.strip() == "None" and view.document.syntax in ("yaml", "json"):
            yield said(
                view,
                key,
                "K27",
                WARNING,
                f"{key.path[-1]} is the text 'None': YAML and JSON write null.",
                "Write null.",
                Change(view.document.name, key.path, None),
            )
        elif (
            key is not None and isinstance(key.value, str) and re.fullmatch(r"\(.*\)", key.value.strip()) and view.document.syntax == "yaml"
        ):
            yield said(
                view, key, "K27", WARNING, f"{key.path[-1]} is the text {key.value!r}: YAML has no tuples.", "Write a list in brackets."
            )
    for key in view.all("betas", "adam_betas"):
        if isinstance(key.value, str) and re.fullmatch(r"\(.*\)", key.value.strip()):
            numbers = [as_number(n) for n in key.value.strip("() ").split(",") if n.strip()]
            yield said(
                view,
                key,
                "K27",
                ERROR,
                f"{key.path[-1]} is the text {key.value!r}: YAML has no tuples.",
                "Write a list in brackets.",
                put(view, key, numbers),
            )


CHECK = Check(
    "K27", "values have the type that is read", types,
    Example({"args.yaml": "model_name_or_path: gpt2\nper_device_train_batch_size: four\ngradient_accumulation_steps: 2\nlearning_rate: "
        "2.0e-5\nbf16: true\noutput_dir: out\nnum_train_epochs: 1\n"}),
    "error for a text or list where a number is read; warning for None as text", "2e-5, which YAML 1.1 leaves as text",
)  # fmt: skip
