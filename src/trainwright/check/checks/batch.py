"""K02 and K11: global = micro x accumulation x data-parallel ranks, and the same in every file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..findings import Change, Check, Example, Finding, Severity
from ..setup import Fact, Setup
from ..view import View, whole
from ._tools import BLOCKED, ERROR, NOTE, WARNING, about, data_ranks, degree, divisors, few, put, said, world

DEEPSPEED_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen("deepspeed"):
        yield from _deepspeed(setup, view)
    yield from _arithmetic(setup)
    yield from _schedule(setup)


def _deepspeed(setup: Setup, view: View) -> Iterator[Finding]:
    """The three keys of one DeepSpeed file, which must multiply for the number of ranks that is not in the file."""
    keys = {k: view.get(k) for k in DEEPSPEED_KEYS}
    if keys["train_batch_size"] is None and keys["train_micro_batch_size_per_gpu"] is None:
        if not any(r.format in ("trainer", "llama_factory", "axolotl") for r in setup.readings) and not view.reading.fragment:
            yield said(
                view, None, "K02", ERROR,
                "Neither train_batch_size nor train_micro_batch_size_per_gpu is given: DeepSpeed stops with an AssertionError.",
                'Add "train_micro_batch_size_per_gpu": "auto" under a Hugging Face Trainer, a number otherwise.',
                Change(view.document.name, ("train_micro_batch_size_per_gpu",), "auto"),
            )  # fmt: skip
        return
    total, micro, steps = (whole(k.value) if k else None for k in keys.values())
    automatic = [k for k, v in keys.items() if v is not None and v.value == "auto"]
    ranks = data_ranks(setup)
    if total and micro:
        yield from _worlds(view, total, micro, steps, ranks)
    elif micro and automatic and len(automatic) < len([k for k in keys.values() if k]):
        yield said(
            view, keys["train_micro_batch_size_per_gpu"], "K02", NOTE,
            f"The micro-batch is fixed to {micro} while {' and '.join(automatic)} are auto: a Trainer with another "
            "per_device_train_batch_size stops.",
            "Make all three auto, or all three numbers.",
            put(view, keys["train_micro_batch_size_per_gpu"], "auto"),
        )  # fmt: skip


def _worlds(view: View, total: int, micro: int, steps: int | None, ranks: int | None) -> Iterator[Finding]:
    key = view.get("train_batch_size")
    per = micro * (steps or 1)
    right = [total // per] if steps and total % per == 0 else [] if steps else divisors(total // micro) if total % micro == 0 else []
    product = f"{total} = {micro} x {steps if steps else 'accumulation'} x ranks"
    if not right:
        each = (ranks or 1) * per
        nearest = each if ranks and steps else max(1, round(total / each)) * each
        yield said(
            view, key, "K02", ERROR, f"No number of ranks makes {product} true.",
            f"train_batch_size {nearest} suits {ranks or nearest // per} ranks.", put(view, key, nearest),
        )  # fmt: skip
    elif ranks and ranks not in right and not (steps is None and total % (micro * ranks) == 0):
        yield said(
            view, key, "K02", ERROR, f"With {ranks} ranks {micro} x {steps or 1} x {ranks} = {per * ranks}, but train_batch_size is {total}.",
            f"Set train_batch_size to {per * ranks}, or use {few(right)} ranks.", put(view, key, per * ranks),
        )  # fmt: skip
    elif ranks is None and right == [1]:
        yield said(
            view, key, "K02", WARNING, f"train_batch_size {total} with a micro-batch of {micro} can run on one GPU only: on more, DeepSpeed stops.",
            f"Drop train_batch_size (it follows) or set it to {micro} x accumulation x GPUs.",
        )  # fmt: skip
    elif ranks is None:
        yield said(view, key, "K02", NOTE, f"{product}: right on {few(right)} data-parallel ranks only.")


def _arithmetic(setup: Setup) -> Iterator[Finding]:
    """Engines other than DeepSpeed: global, micro and ranks from anywhere."""
    fact, micro = setup.fact("training.global_batch_size"), whole(setup.value("strategy.micro_batch_size"))
    total, ranks = whole(fact.value) if fact else None, data_ranks(setup)
    if fact is None or not total or fact.place.path[-1:] == ("train_batch_size",):
        return
    per = (micro or 1) * (ranks or 1)
    if ranks and total % per:
        severity = _certain(setup, fact)
        yield about(
            fact, "K02", severity, f"Global batch {total} is no multiple of micro-batch {micro or 1} x {ranks} data-parallel ranks = {per}.",
            f"Use {max(1, total // per) * per} or {(total // per + 1) * per}.",
        )  # fmt: skip
    elif micro and ranks is None and total % micro:
        yield about(
            fact, "K02", ERROR, f"Global batch {total} is no multiple of the micro-batch {micro}.",
            f"Use {max(1, total // micro) * micro} or {(total // micro + 1) * micro}.",
        )  # fmt: skip
    elif total == (micro or 1) and ranks is None and (setup.value("strategy.framework") or "") not in ("", "ddp") and total < 2:
        yield about(
            fact, "K02", WARNING, f"Global batch {total} cannot be spread over more than one GPU, and the file asks for a sharded run.",
            "Leave the global batch out (it follows from micro-batch x GPUs) or make it a multiple of the GPUs.",
        )  # fmt: skip


def _certain(setup: Setup, fact: Fact) -> Severity:
    """An error, unless the number of processes stands for a placeholder (one node of a model that needs many)."""
    total, rest = world(setup), degree(setup, "tp") * degree(setup, "pp") * degree(setup, "cp")
    return BLOCKED if not total or total < rest else ERROR


def _schedule(setup: Setup) -> Iterator[Finding]:
    """Batch ramps: start and increment are multiples of micro-batch x ranks."""
    ranks, micro = data_ranks(setup), whole(setup.value("strategy.micro_batch_size"))
    for view in setup.views:
        ramp = view.get("rampup_batch_size")
        numbers = (
            ramp.value.split() if ramp and isinstance(ramp.value, str) else ramp.value if ramp and isinstance(ramp.value, list) else []
        )
        if len(numbers) != 3 or not ranks or not micro:
            continue
        start, step = whole(numbers[0]), whole(numbers[1])
        if start and step and (start % (micro * ranks) or step % (micro * ranks)):
            yield said(
                view, ramp, "K02", ERROR,
                f"The batch ramp begins at {start} and grows by {step}: not multiples of micro-batch {micro} x {ranks} ranks = {micro * ranks}.",
                f"Use multiples of {micro * ranks}.",
            )  # fmt: skip


def agreement(setup: Setup) -> Iterable[Finding]:
    """Values that two files both say, and that must be one."""
    for name, word in (
        ("training.accumulation", "accumulation"), ("strategy.micro_batch_size", "micro-batch"), ("training.clip", "gradient clipping"),
        ("training.global_batch_size", "global batch"),
    ):  # fmt: skip
        facts = [f for f in setup.facts(name) if isinstance(f.value, (int, float)) and not isinstance(f.value, bool)]
        for other in facts[1:]:
            if other.value != facts[0].value and other.place.file != facts[0].place.file:
                yield about(
                    other, "K11", ERROR,
                    f"{word} is {other.value:g} here and {facts[0].value:g} at {facts[0].place}: the engine refuses, or one of them is ignored in silence.",
                    f"Say {facts[0].value:g} in both, or \"auto\" here.",
                    Change(other.place.file, other.place.path, facts[0].value),
                )  # fmt: skip
    yield from _alone(setup)


def _alone(setup: Setup) -> Iterator[Finding]:
    """One half of a pair: a number here that somebody else's file must repeat."""
    for view in setup.seen("deepspeed", "accelerate"):
        key = view.get("gradient_accumulation_steps")
        steps = whole(key.value) if key else None
        beside = any(f.place.file != view.document.name for f in setup.facts("training.accumulation"))
        automatic = any(view.value(k) == "auto" for k in ("train_batch_size", "train_micro_batch_size_per_gpu"))
        if steps and steps > 1 and not beside and (automatic or view.format == "accelerate"):
            yield said(
                view, key, "K11", WARNING,
                f"gradient_accumulation_steps is fixed to {steps} while the rest comes from the launcher: with another number there the run stops "
                "(Trainer) or accumulates by this file alone (Accelerate).",
                'Write "auto", or the same number in both.', put(view, key, "auto"),
            )  # fmt: skip
    yield from _elsewhere(setup)


def _elsewhere(setup: Setup) -> Iterator[Finding]:
    """A command that accumulates and names a configuration which accumulates too, and was not given."""
    given = {r.document.name.rpartition("/")[2] for r in setup.readings}
    for view in setup.seen("accelerate"):
        config = view.get("config_file")
        name = str(config.value) if config else ""
        fact = next((f for f in setup.facts("training.accumulation") if f.place.file == view.document.name), None)
        steps = whole(fact.value) if fact else None
        if fact and steps and steps > 1 and name and name.rpartition("/")[2] not in given:
            yield about(
                fact, "K11", NOTE, f"Accumulation {steps} must be what {name} says too; that file was not given to this check.", f"Check "
                    f"both together: trainwright check {view.document.name} {name}",
            )  # fmt: skip


CHECK = (
    Check(
        "K02", "batch arithmetic: global = micro x accumulation x data-parallel ranks", batch,
        Example({"ds_config.json": '{\n  "train_batch_size": 100,\n  "train_micro_batch_size_per_gpu": 8,\n  "gradient_accumulation_steps": 4,\n  '
                 '"zero_optimization": {"stage": 2}\n}\n'}),
        "error where no number of ranks, or not the given one, satisfies it, and where DeepSpeed has no batch key; warning where one GPU alone does; "
        "note with the number of ranks that does",
        "a file that is right at one world size only",
    ),
    Check(
        "K11", "accumulation, micro-batch and clipping the same in all files", agreement,
        Example(
            {"ds_config.json": '{\n  "train_batch_size": "auto",\n  "train_micro_batch_size_per_gpu": "auto",\n  "gradient_accumulation_steps": 32,\n'
             '  "zero_optimization": {"stage": 2}\n}\n'},
            launch="torchrun --nproc_per_node 8 train.py --deepspeed ds_config.json --per_device_train_batch_size 4 "
            "--gradient_accumulation_steps 128 --learning_rate 1e-5 --output_dir out --bf16 True",
        ),
        "error where two files differ; warning where one file fixes what its launcher says too; note where the other file was not given",
        "the same number in both",
    ),
)  # fmt: skip
