"""The learning rate's course: what each engine is told, what conversions carry, what the FSDP2 script does with it."""

from __future__ import annotations

import json
import math
from importlib import resources
from itertools import pairwise
from typing import Any

import pytest

from trainwright.check.convert import convert
from trainwright.emit import TARGETS, Options, emit
from trainwright.emit.rate import deepspeed_scheduler, rate_of, trainer_scheduler
from trainwright.emit.shell import flags_of

from .cases import BY_HAND, run_of

ASKED = {"model": "llama-3.1-8b", "on": "16xH100"}
RUN = run_of({"strategy": {"framework": "deepspeed"}, "training": {"tokens": 4096 * 64 * 500}})  # 500 steps
COSINE = Options(learning_rate=1e-4, schedule="cosine", warmup_steps=50, least_learning_rate=1e-5)


def rows(found: Any) -> dict[str, tuple[str, Any, Any]]:
    return {r.field: (r.kind, r.before, r.after) for r in found.rows}


def trainer(**more: Any) -> dict[str, str]:
    arguments = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "learning_rate": 1e-5,
        "max_steps": 500,
        **more,
    }
    return {"args.json": json.dumps(arguments), "launch.sh": "torchrun --nnodes 2 --nproc-per-node 8 train.py args.json\n"}


@pytest.mark.parametrize(
    ("options", "scheduler"),
    [
        (Options(), None),
        (Options(schedule="constant", warmup_steps=0), None),
        (
            Options(learning_rate=1e-4, schedule="constant", warmup_steps=20),
            ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 20, "warmup_type": "linear"}),
        ),
        (
            Options(learning_rate=1e-4, schedule="linear", warmup_steps=1),  # DeepSpeed warms up for two steps at least
            ("WarmupDecayLR", {"total_num_steps": 500, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 2, "warmup_type": "linear"}),
        ),
        (
            COSINE,
            ("WarmupCosineLR", {"total_num_steps": 500, "warmup_num_steps": 50, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1, "warmup_type": "linear"}),
        ),
    ],
)  # fmt: skip
def test_deepspeed_is_told_its_scheduler(options: Options, scheduler: Any) -> None:
    found = deepspeed_scheduler(rate_of(RUN, options, "constant"))
    if scheduler is None:
        assert found is None
        return
    assert found is not None
    assert found["type"] == scheduler[0]
    assert found["params"] == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in scheduler[1].items()}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (Options(), {"lr_scheduler_type": "cosine"}),
        (Options(schedule="linear", warmup_steps=7), {"lr_scheduler_type": "linear", "warmup_steps": 7}),
        (Options(schedule="constant", warmup_steps=7), {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}),
        (COSINE, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}, "warmup_steps": 50}),
        (Options(schedule="linear", warmup_steps=10**6), {"lr_scheduler_type": "linear", "warmup_steps": 500}),
    ],
)
def test_trainer_is_told_its_scheduler(options: Options, arguments: dict[str, Any]) -> None:
    assert trainer_scheduler(rate_of(RUN, options, "cosine")) == arguments


def test_megatron_and_torchtitan_have_flags_for_it() -> None:
    megatron = flags_of(emit(run_of(BY_HAND["megatron"]), "megatron", COSINE)["launch.sh"])
    assert [megatron[f"--{f}"] for f in ("lr-decay-style", "lr-warmup-iters", "min-lr")] == [["cosine"], ["50"], ["1e-05"]]
    titan = flags_of(emit(run_of(BY_HAND["torchtitan"]), "torchtitan", COSINE)["launch.sh"])
    assert [titan[f"--lr_scheduler.{f}"] for f in ("decay-type", "warmup-steps")] == [["cosine"], ["50"]]
    assert float(titan["--lr_scheduler.min-lr-factor"][0]) == pytest.approx(0.1)
    assert not [f for f in flags_of(emit(run_of(BY_HAND["torchtitan"]), "torchtitan")["launch.sh"]) if "lr_scheduler" in f]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_script_follows_the_course(shape: str) -> None:
    text = (resources.files("trainwright.emit") / "templates" / "train_fsdp.py.txt").read_text()
    source = text[text.index("def rate_at") : text.index("class Batches")]
    plan = {"learning_rate": 2.0, "least_learning_rate": 2.0 if shape == "constant" else 0.5, "warmup_steps": 4, "schedule": shape}
    names: dict[str, Any] = {"PLAN": plan, "math": math}
    exec(source, names)
    rates = [names["rate_at"](step, 20) for step in range(21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[20] == pytest.approx(plan["least_learning_rate"])
    assert rates[12] == pytest.approx(2.0 if shape == "constant" else 1.25), "half way down"
    assert all(a >= b for a, b in pairwise(rates[4:]))


def test_a_share_of_the_run_becomes_steps() -> None:
    found = convert(trainer(lr_scheduler_type="cosine", warmup_ratio=0.1), "megatron", **ASKED)
    flags = flags_of(found.files["launch.sh"])
    assert (flags["--lr-decay-style"], flags["--lr-warmup-iters"], flags["--min-lr"]) == (["cosine"], ["50"], ["0.0"])
    assert rows(found)["training.lr_schedule"] == ("kept", "cosine", "cosine")
    assert rows(found)["training.warmup_share"][0] == "kept"


def test_what_the_source_engine_takes_unless_told_is_written_for_the_target() -> None:
    """The Trainer falls linearly to 0 without a word; DeepSpeed's JSON then has to say so."""
    found = convert(trainer(), "fsdp", **ASKED)
    plan = json.loads(found.files["plan.json"])
    assert (plan["schedule"], plan["warmup_steps"], plan["least_learning_rate"]) == ("linear", 0, 0.0)
    assert rows(found)["training.lr_schedule"] == ("assumed", None, "linear")


def test_a_course_that_no_writer_knows_is_named() -> None:
    found = convert(trainer(lr_scheduler_type="inverse_sqrt", warmup_steps=5), "fsdp", **ASKED)
    assert rows(found)["training.lr_schedule"] == ("changed", "inverse_sqrt", "constant")
    assert rows(found)["training.warmup_steps"] == ("kept", 5, 5)


@pytest.mark.parametrize("to", sorted(TARGETS))
def test_the_readme_says_how_to_write_the_set_again(to: str) -> None:
    assert f"--to {to} -o" in (text := emit(run_of(BY_HAND[to]), to)["README.md"])
    assert "`--force`" in text
