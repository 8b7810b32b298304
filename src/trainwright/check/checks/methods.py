"""K07, K30: quantization, adapters, stages and methods that agree with each other and with the file's own name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import Value, View, as_number, truthy
from ._tools import ERROR, HF, NOTE, WARNING, put, said

LORA_VALUES = ("lora_r", "lora_alpha", "lora_dropout", "lora_rank", "lora_target_modules", "lora_target", "lora_dim")
# What switches LoRA on, by program; a program that shows none of them may have its own (its name says so).
LORA_SWITCHES = (
    "lora_enable", "use_lora", "use_peft", "adapter", "finetuning_type", "peft", "lora", "enable_lora", "peft_type", "use_qlora", "qlora",
    "only_optimize_lora", "peft_scheme", "training_mode", "tuner_type", "train_type", "sft_type", "peft_config",
)  # fmt: skip


def bits(view: View) -> tuple[int, Value] | None:
    """Bits of the base and the key that says so."""
    for name, value in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        key = view.get(name)
        if key is not None and truthy(key.value):
            return value, key
    key = view.get("quantization_bit", "bits", "quantization_bits", "quant_bit")
    number = as_number(key.value) if key else None
    return (int(number), key) if key is not None and number in (3, 4, 8) else None


def quantized(setup: Setup) -> Iterator[Finding]:
    stage = _stage(setup)
    fsdp = str(setup.value("strategy.framework") or "") in ("fsdp1", "fsdp2")
    for view in setup.views:
        if view.format in ("deepspeed", "kubernetes", "slurm"):
            continue
        said_bits = bits(view)
        adapter = str(view.value("adapter", "finetuning_type", "method") or "").lower()
        if said_bits:
            number, key = said_bits
            if _full(view, adapter):
                yield said(
                    view,
                    key,
                    "K07",
                    ERROR,
                    f"A {number}-bit base cannot be trained in full: its weights have no gradients.",
                    "Train adapters (LoRA), or drop the quantization.",
                )
            elif adapter == "lora" and number == 4 and view.format == "axolotl":
                yield said(
                    view,
                    key,
                    "K07",
                    WARNING,
                    "adapter: lora with a 4-bit base is QLoRA; axolotl's checks expect adapter: qlora.",
                    "Say adapter: qlora.",
                    put(view, view.get("adapter"), "qlora"),
                )
            elif adapter == "qlora" and number == 8:
                yield said(view, key, "K07", ERROR, "QLoRA is a 4-bit base; 8-bit is asked for.", "load_in_4bit.")
            if number == 8 and (stage == 3 or fsdp):
                yield said(
                    view,
                    key,
                    "K07",
                    ERROR,
                    f"An 8-bit base cannot be partitioned ({'ZeRO-3' if stage == 3 else 'FSDP'}): its scales stay behind.",
                    "Use 4-bit with bf16 storage, or stage 2.",
                )
            elif number == 4 and stage is not None and stage in (1, 2, 3) and _own_stage(view) is not None:
                storage = str(view.value("bnb_4bit_quant_storage") or "").lower()
                model = str(view.value("pretrain", "model_name_or_path", "base_model") or "").lower()
                if stage == 3 and storage not in ("bfloat16", "bf16", "float16", "float32"):
                    yield said(
                        view,
                        key,
                        "K07",
                        WARNING,
                        "ZeRO-3 partitions a 4-bit base only where it is stored as bf16 (bnb_4bit_quant_storage).",
                        "bnb_4bit_quant_storage: bfloat16.",
                    )
                elif stage < 3 and re.search(r"8x\d+b|moe|mixtral", model):
                    yield said(
                        view, key, "K07", WARNING,
                        f"A 4-bit mixture of experts at ZeRO stage {stage}: every GPU holds the whole base, and the routed experts' kernels "
                        f"are dequantized one by one.",
                        "ZeRO-3 without quantization, or a dense model.",
                    )  # fmt: skip
        yield from _named(view, adapter, said_bits)


def _full(view: View, adapter: str) -> bool:
    """Surely no adapter: the format has a key for it, and it says so or is absent."""
    if view.format == "llama_factory":
        return adapter in ("full", "freeze")
    return view.format == "axolotl" and view.get("adapter") is not None and adapter in ("", "none")


def _stage(setup: Setup) -> int | None:
    for view in setup.views:
        found = _own_stage(view)
        if found is not None:
            return found
    return None


def _own_stage(view: View) -> int | None:
    found = as_number(view.value("zero_optimization.stage", "zero_stage"))
    if found is None and isinstance(view.value("deepspeed"), str):
        hit = re.search(r"z(?:ero)?[_-]?(?:stage)?[_-]?([0-3])(?![0-9])", str(view.value("deepspeed")).rsplit("/", 1)[-1].lower())
        return int(hit.group(1)) if hit else None
    return None if found is None else int(found)


def _named(view: View, adapter: str, said_bits: tuple[int, Value] | None) -> Iterator[Finding]:
    """QLoRA by name or switch, without a bit width."""
    switch = view.get("use_qlora", "qlora")  # FastChat's q_lora is 4 bits by itself
    if adapter == "qlora" and not said_bits:
        yield said(
            view, view.get("adapter"), "K07", ERROR, "adapter: qlora without load_in_4bit: axolotl refuses it.", "Add load_in_4bit: true."
        )
    elif switch is not None and truthy(switch.value) and not said_bits and view.get("bnb_4bit_quant_type") is None:
        yield said(
            view, switch, "K07", WARNING, f"{switch.path[-1]} is on, but no bit width is given: the program's default decides how the base is quantized.",
            "Say it: --bits 4, --quant_bit 4 or load_in_4bit, as the program calls it.",
        )  # fmt: skip
    elif "qlora" in view.document.name.lower() and view.format in (*HF,) and not said_bits and switch is None and adapter in ("lora", ""):
        base = str(view.value("model_name_or_path", "base_model") or "").lower()
        if not re.search(
            r"4bit|int4|gptq|awq|bnb|aqlm|8bit|int8|nf4", base + str(view.value("quantization_method", "quantization") or "").lower()
        ):
            yield said(
                view,
                None,
                "K07",
                WARNING,
                "The file is called qlora, but nothing in it quantizes the base.",
                "load_in_4bit: true (quantization_bit: 4 in LLaMA-Factory).",
            )


def pairs(setup: Setup) -> Iterator[Finding]:
    for view in setup.views:
        if view.format in ("deepspeed", "accelerate", "kubernetes"):
            continue
        yield from _lora(view)
        yield from _galore(view)
        yield from _zero_plus(setup, view)
        yield from _frozen(setup, view)


def _lora(view: View) -> Iterator[Finding]:
    values = [k for k in view.all(*LORA_VALUES) if k.value not in (None, "", [], "null")]
    adapter = view.get("adapter", "finetuning_type", "peft_type", "train_type")
    if values and adapter is not None and str(adapter.value).lower() in ("full", "freeze", "none", "null", ""):
        yield said(
            view, values[0], "K30", WARNING, f"{values[0].path[-1]} has no effect: {adapter.path[-1]} is {adapter.value or 'empty'}, so a "
                f"full fine-tune starts.",
            f"Set {adapter.path[-1]} to lora, or remove the LoRA values.",
        )  # fmt: skip
        return
    off = view.get("lora_enable", "use_lora", "use_peft")
    if values and off is not None and not truthy(off.value) and isinstance(off.value, (bool, str)) and off.value != "":
        yield said(
            view,
            off,
            "K30",
            WARNING,
            f"LoRA values are given, but {off.path[-1]} is off: a full fine-tune starts.",
            "Switch it on, or remove the values.",
        )
    elif values and view.format in ("trainer", "trl") and not any(view.get(s) for s in LORA_SWITCHES) and not _lora_program(view):
        yield said(
            view, values[0], "K30", WARNING, "LoRA values are given and nothing switches LoRA on: a program with a switch (--lora_enable, "
                "--use_peft) starts a full fine-tune.",
            "Add the switch.",
        )  # fmt: skip
    elif (
        not values
        and "lora" in view.document.name.lower()
        and view.format in ("trainer", "trl")
        and not any(view.get(s) for s in LORA_SWITCHES)
        and not _lora_program(view)
    ):
        yield said(
            view,
            None,
            "K30",
            WARNING,
            "The file is called lora and nothing in it asks for LoRA: a full fine-tune starts, with ten times the memory.",
            "Add --lora_enable True (or the program's own switch).",
        )


def _lora_program(view: View) -> bool:
    """The program itself is a LoRA program: its name says so, and its values need no switch."""
    import re as _re

    return bool(_re.search(r"[\w/.-]*lora[\w.-]*\.py\b", view.document.text)) or (
        view.document.syntax != "shell" and view.get("use_peft") is None and view.format == "trainer" and False
    )


def _galore(view: View) -> Iterator[Finding]:
    for name in ("use_galore", "use_badam", "use_apollo"):
        key = view.get(name)
        kind = str(view.value("finetuning_type") or "").lower()
        if key is not None and truthy(key.value) and kind not in ("", "full"):
            yield said(
                view, view.get("finetuning_type"), "K30", ERROR, f"{name} trains all weights through a low-rank gradient; finetuning_type "
                    f"{kind} freezes them, and LLaMA-Factory refuses the pair.",
                "finetuning_type full.", put(view, view.get("finetuning_type"), "full"),
            )  # fmt: skip
        if key is not None and truthy(key.value) and view.get("deepspeed") and name != "use_badam":
            yield said(
                view,
                key,
                "K30",
                ERROR,
                f"{name} and DeepSpeed exclude each other: gradients are partitioned before they can be projected.",
                "Drop one.",
            )


def _zero_plus(setup: Setup, view: View) -> Iterator[Finding]:
    lora = setup.value("training.method") in ("lora", "qlora")
    for other in setup.seen("deepspeed"):
        key = other.get("zero_quantized_weights", "zero_quantized_gradients")
        if lora and key is not None and truthy(key.value):
            yield said(
                other,
                key,
                "K30",
                WARNING,
                f"{key.path[-1]} (ZeRO++) quantizes frozen weights again at every gather, and adapters hardly have gradients.",
                "Switch it off with LoRA.",
                put(other, key, False),
            )


def _frozen(setup: Setup, view: View) -> Iterator[Finding]:
    if view.format not in (*HF, "automodel") or str(setup.value("strategy.framework") or "") != "ddp":
        return
    frozen = next((k for k in view.all("freeze_vision_tower", "tune_mm_mlp_adapter", "freeze_backbone") if truthy(k.value)), None)
    unused = view.get("ddp_find_unused_parameters")
    if (
        frozen is not None
        and unused is not None
        and not truthy(unused.value)
        and any(truthy(k.value) for k in view.all("lora_enable", "use_lora"))
    ):
        yield said(
            view,
            unused,
            "K30",
            NOTE,
            "Parts of the model are frozen under DDP: parameters without gradients make it wait unless requires_grad is off before wrapping.",
        )


def _example(text: str) -> dict[str, Any]:
    return {"train.yaml": "model_name_or_path: meta-llama/Llama-2-7b-hf\nstage: sft\ndo_train: true\n" + text + "template: default\ndataset: "
        "identity\ncutoff_len: 1024\n"
            "output_dir: out\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-5\n"}  # fmt: skip


CHECK = (
    Check(
        "K07", "quantization, adapter, stage and name agree", quantized, Example(_example("finetuning_type: full\nquantization_bit: 4\n")),
        "error where the engine refuses; warning where a default decides or a name promises what nothing does", "fp16 with a GPTQ base",
    ),
    Check(
        "K30", "methods that go together", pairs, Example(_example("finetuning_type: freeze\nfreeze_trainable_layers: 8\nuse_galore: true\ngalore_rank: 32\n")),
        "error where the engine refuses; warning where a value has no method", "optimizer in backward with accumulation 1",
    ),
)  # fmt: skip
