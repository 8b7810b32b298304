"""K16, K17, K18: an optimizer that the sharding allows, a schedule and a rate that can be meant, one owner of both."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import View, as_number
from ._tools import ERROR, HF, NOTE, WARNING, about, put, said
from .zero import stage_of

ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
# Types that DeepSpeed's engine builds by name (runtime/config.py DEEPSPEED_OPTIMIZERS); others are looked for in torch.optim.
DEEPSPEED_TYPES = (
    "adam",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamax",
    "nadam",
    "radam",
    "adadelta",
    "adafactor",
    *ONE_BIT,
)


def possible(setup: Setup) -> Iterator[Finding]:
    yield from _engines(setup)
    yield from _trainers(setup)
    yield from _torchtune(setup)


def _engines(setup: Setup) -> Iterator[Finding]:
    """Optimizers by DeepSpeed's own names."""
    for view in setup.seen("deepspeed", "accelerate", "gpt_neox"):
        key, stage = view.get("optimizer.type"), stage_of(view)
        name = str(key.value).lower() if key else ""
        if key and name in ONE_BIT and stage:
            yield said(
                view,
                key,
                "K16",
                ERROR,
                f"{key.value} compresses what ranks exchange and cannot run with ZeRO stage {stage}.",
                "Use AdamW, or stage 0.",
            )
        elif key and name and name not in DEEPSPEED_TYPES and name != "auto":
            yield said(
                view,
                key,
                "K16",
                ERROR,
                f"DeepSpeed knows no optimizer {key.value!r} (that is a name of the Trainer's --optim).",
                'Use "AdamW".',
                put(view, key, "AdamW"),
            )


def _trainers(setup: Setup) -> Iterator[Finding]:
    """Optimizers by the names of Hugging Face's Trainer."""
    sharded = str(setup.value("strategy.framework") or "") in ("fsdp1", "fsdp2")
    for view in setup.seen(*HF):
        key = view.get("optim", "optimizer")
        name = str(key.value).lower() if key else ""
        fsdp = (
            sharded
            or (view.get("fsdp") is not None and view.value("fsdp") not in (None, "", False, []))
            or view.get("fsdp_config") is not None
        )
        if key and fsdp and ("bnb_8bit" in name or name.startswith("paged") or name == "adamw_8bit"):
            yield said(
                view, key, "K16", WARNING,
                f"{key.value} is bitsandbytes': its blocks of 2048 cross the shards of FSDP, its state does not save or load there, and "
                f"paging is unknown to FSDP.",
                "Use adamw_torch_fused, or torchao's 8-bit (adamw_torch_8bit).", put(view, key, "adamw_torch_fused"),
            )  # fmt: skip
        steps = as_number(view.value("gradient_accumulation_steps")) or 1
        layerwise = key is not None and ("layerwise" in name or ("galore" in name and "layerwise" in name))
        fused = view.get("optimizer_in_bwd", "optimizer_in_backward", "galore_layerwise")
        if steps > 1 and (layerwise or (fused is not None and view.on("optimizer_in_bwd", "optimizer_in_backward", "galore_layerwise"))):
            yield said(
                view,
                fused or key,
                "K16",
                ERROR,
                f"A gradient is used and freed in backward, so {steps:g} micro-batches cannot be accumulated.",
                "Accumulate 1, or switch it off.",
            )


def _torchtune(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen("torchtune"):
        key = view.get("optimizer_in_bwd")
        steps = as_number(view.value("gradient_accumulation_steps")) or 1
        if key is not None and view.on("optimizer_in_bwd") and steps > 1:
            yield said(
                view,
                key,
                "K16",
                ERROR,
                f"A gradient is used and freed in backward, so {steps:g} micro-batches cannot be accumulated.",
                "Accumulate 1, or switch it off.",
                put(view, key, False),
            )


def schedule(setup: Setup) -> Iterator[Finding]:
    yield from _steps(setup)
    yield from _rate(setup)
    for view in setup.views:
        warm = view.get("warmup_steps")
        number = as_number(warm.value) if warm else None
        if warm and number is not None and 0 < number < 1 and view.format in HF:
            yield said(
                view,
                warm,
                "K17",
                NOTE,
                f"warmup_steps {number:g} is below one step; as a share it is read by transformers 5 only (warmup_ratio before).",
                f"warmup_ratio: {number:g}.",
            )


def _steps(setup: Setup) -> Iterator[Finding]:
    steps, warm, decay = (
        as_number(setup.value(f"training.{n}_steps" if n != "total" else "training.steps")) for n in ("total", "warmup", "decay")
    )
    fact = setup.fact("training.warmup_steps")
    if fact and warm and steps and warm >= steps:
        yield about(
            fact,
            "K17",
            WARNING,
            f"Warm-up takes {warm:g} of {steps:g} steps: the run never reaches its rate.",
            f"{max(1, int(steps * 0.03))} steps are 3 %.",
        )
    elif fact and warm and decay and warm >= decay:
        yield about(fact, "K17", WARNING, f"Warm-up ends at step {warm:g}, decay at {decay:g}.", "Let decay end with the run.")
    end = setup.fact("training.decay_steps")
    if end and decay and steps and not 0.5 <= decay / steps <= 2 and abs(decay - steps) > 1:
        what = f"The rate is at its end at step {decay:g} of {steps:g}"
        yield about(
            end,
            "K17",
            NOTE if decay < steps else WARNING,
            what + (": the rest runs at the least rate." if decay < steps else ": the run stops before it has decayed."),
            f"Decay over {steps:g} steps.",
        )


# Highest peak rates that published recipes use, by method; full fine-tuning of pretrained weights forgets above it.
FULL_FINETUNE = 5e-5


def _rate(setup: Setup) -> Iterator[Finding]:
    fact = setup.fact("training.learning_rate")
    rate = as_number(fact.value) if fact else None
    if fact is None or rate is None:
        return
    if rate >= 0.1 or 0 < rate < 1e-8:
        yield about(
            fact,
            "K17",
            WARNING,
            f"A learning rate of {rate:g} is outside of what any Adam-like optimizer trains with.",
            "Between 1e-6 and 1e-3.",
        )
    for view in setup.seen("llama_factory", "trainer", "trl", "axolotl"):
        key = view.get("learning_rate")
        if key is None or view.document.name != fact.place.file or not _full_finetune(setup, view):
            continue
        if rate > FULL_FINETUNE and rate < 0.1:
            yield said(
                view, key, "K17", WARNING, f"A learning rate of {rate:g} is a LoRA rate; full fine-tuning of pretrained weights takes a tenth of it.",
                "1e-5 for full fine-tuning.", put(view, key, 1e-5),
            )  # fmt: skip
        elif 0 < rate < 5e-6 and setup.value("training.method") in ("lora", "qlora"):
            yield said(view, key, "K17", NOTE, f"A learning rate of {rate:g} is low for adapters.", "1e-4 is usual for LoRA.")


def _full_finetune(setup: Setup, view: View) -> bool:
    """Surely all weights of a pretrained model, several billion of them: small models stand higher rates."""
    if view.format != "llama_factory" or str(view.value("finetuning_type")).lower() != "full":
        return False
    import re

    name = str(view.value("model_name_or_path") or view.value("model") or "")
    size = re.search(r"(\d+(?:\.\d+)?)[bB](?![a-z])", name)
    return str(view.value("stage") or "sft") in ("sft", "dpo", "kto", "rm", "ppo") and (size is None or float(size.group(1)) >= 1.5)


def owner(setup: Setup) -> Iterator[Finding]:
    """An optimizer without its scheduler, a scheduler without its optimizer, or both named twice."""
    for view in setup.seen("deepspeed"):
        made, plan = view.get("optimizer"), view.get("scheduler")
        automatic = any(
            view.value(k) == "auto" for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        if made is not None and plan is None and automatic:
            yield said(
                view, made, "K18", WARNING,
                "DeepSpeed owns the optimizer and nothing owns the scheduler: the Trainer builds one of its own beside it, other launchers "
                "train at a constant rate.",
                'Add "scheduler": {"type": "WarmupDecayLR", "params": {... "auto"}}, or remove the optimizer too.',
            )  # fmt: skip
        elif plan is not None and made is None:
            yield said(
                view, plan, "K18", WARNING, "DeepSpeed owns the scheduler but not the optimizer: Accelerate refuses that, the Trainer passes "
                    "its own optimizer to it.",
                "Add the optimizer block, or remove the scheduler.",
            )  # fmt: skip
        elif made is None and plan is None and automatic and next(setup.seen(*HF), None) is None:
            yield said(
                view, None, "K18", NOTE, "Neither optimizer nor scheduler is here: the program must pass its own, as the Trainer does; one that "
                    "expects DeepSpeed to (Accelerate's DummyOptim) fails.",
                "Add both blocks where the program passes none.",
            )  # fmt: skip
        named = next((v.get("optim") for v in setup.seen(*HF) if v.get("optim")), None)
        if made is not None and named is not None and as_text(named.value) not in ("adamw_torch", "adamw_torch_fused", "adamw_hf", ""):
            yield said(
                view,
                made,
                "K18",
                WARNING,
                f"The DeepSpeed file builds the optimizer; --optim {named.value} is ignored.",
                "Keep one of them.",
            )


def as_text(value: object) -> str:
    return str(value or "").lower()


CHECK = (
    Check(
        "K16", "the optimizer works with the sharding", possible,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "optimizer": {"type": "OneBitAdam", "params": {"lr": '
            '1e-4}},\n  "zero_optimization": {"stage": 2}\n}\n'}),
        "error where the engine stops; warning for bitsandbytes' 8-bit and paged optimizers under FSDP", "torchao's 8-bit optimizer; "
        "optimizer in backward with accumulation 1",
    ),
    Check(
        "K17", "warm-up, decay and learning rate are plausible", schedule,
        Example({"sft.yaml": "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: "
            "llama3\ndataset: identity\n"
                 "cutoff_len: 1024\noutput_dir: out\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-4\nbf16: true\n"}),
        "warning; note where part of the run is at the least rate", "a decay one step past the end",
    ),
    Check(
        "K18", "optimizer and scheduler have one owner", owner,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": "auto",\n  "optimizer": {"type": "AdamW", "params": {"lr": '
            '"auto"}},\n  "zero_optimization": {"stage": 3}\n}\n'}),
        "warning; note where neither is in a file that others complete", "no optimizer in a file for the Trainer, which makes its own",
    ),
)  # fmt: skip
