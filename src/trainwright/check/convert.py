"""Files of one engine -> files of another, with a table of everything that is not the same on the other side.

What the source says becomes a run spec, the run spec is mended to what the target can say, and the target's writer writes it. Then every field is
compared: what the source states (or its engine takes) against what the written files hold. Nothing that differs is left out of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..emit import TARGETS, Files, Options, emit, settled
from ..emit.base import Target, dig
from ..emit.common import steps
from ..emit.fields import ALL, DEFAULTS, engine_of, left
from ..emit.nearest import mended, refused, why
from ..emit.rate import SHAPES, Rate, rate_of
from ..errors import SpecError
from ..resolve import Run, resolve
from ..search.constraints import check_plan
from ..spec.run import validate
from . import semantics
from .formats._facts import number, plain
from .read import UNKNOWN, read_setup
from .setup import Fact, Setup
from .spec import to_spec

KINDS = {
    "changed": "the target says or does something else",
    "lost": "the target's files have no place for it: the training program has to do it",
    "assumed": "no file said it",
    "added": "the target's files say it, the source's do not",
    "contradicted": "two files of the source differ; the first counts",
    "not carried": "a key that no plan holds (data, logging, evaluation, ...)",
    "kept": "the same on both sides",
}
EXTRAS = (
    "training.learning_rate", "training.lr_schedule", "training.least_learning_rate", "training.warmup_steps", "training.warmup_share", "training.clip",
    "training.accumulation", "training.steps", "training.decay_steps", "training.loss_scale", "launch.timeout_s",
)  # fmt: skip
STATED = ("cluster.nodes", "cluster.gpus_per_node", *ALL)
# Of what no file says, these decide what is trained: they are named even at their defaults.
DECIDING = (
    "training.seq_len", "training.global_batch_size", "training.precision", "training.master_weights", "training.gradient_dtype", "training.optimizer",
    "training.method", "strategy.framework", "strategy.sharding", "strategy.micro_batch_size", "strategy.recompute",
)  # fmt: skip
DERIVED = ("strategy.dp", "strategy.dp_shard", "strategy.reserved_gb")
NO_CLIPPING = 1e9  # a norm that is never reached, where the target would take 0 for "no gradient at all"
OPTIMIZER_KEYS = {
    "weight_decay": "weight_decay", "adam_beta1": "beta1", "beta1": "beta1", "adam_beta2": "beta2", "beta2": "beta2", "adam_weight_decay": "weight_decay",
}  # fmt: skip
CLIPS_AT_ZERO = ("fsdp", "torchtitan")
RATES = ("training.lr_schedule", "training.least_learning_rate", "training.warmup_steps", "training.warmup_share")
RATE_OF: Mapping[str, Callable[[Run, Options], Rate]] = {
    "trainer": lambda run, options: rate_of(run, options, "cosine"),
    "deepspeed": lambda run, options: rate_of(run, options, "constant"),
    "fsdp": lambda run, options: rate_of(run, options, "constant"),
    "megatron": lambda run, options: rate_of(run, options, "cosine", max(1, min(2000, steps(run) // 100)), options.learning_rate / 10),
    "torchtitan": lambda run, options: rate_of(run, options, "linear", 200),
}
LINEAR_ENDS_AT_ZERO = ("trainer", "deepspeed")  # as their schedulers are made
NOTES = {
    "training.clip": "written as a norm that is never reached",
    "training.lr_schedule": "no writer here knows that one",
    "training.warmup_steps": "no engine warms up longer than it trains",
    "training.least_learning_rate": "the target's scheduler of that shape ends at 0",
}


@dataclass(frozen=True)
class Row:
    """One field: `kind` is of `KINDS`; `before` and `after` are None where that side says nothing; `place` where the source says it."""

    field: str
    kind: str
    before: Any
    after: Any
    why: str = ""
    place: str = ""


@dataclass(frozen=True)
class Conversion:
    """`files` {name: text} of the target; `rows` every field, what differs first; `formats` {source file: its format}."""

    target: str
    files: Files
    rows: tuple[Row, ...]
    formats: Mapping[str, str]

    @property
    def differing(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.kind != "kept")

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target, "formats": dict(self.formats), "rows": [asdict(r) for r in self.rows], "files": dict(self.files)}


def convert(
    files: Mapping[str, bytes | str],
    to: str,
    launch: str = "",
    model: Any = None,
    on: Any = None,
    options: Options | None = None,
) -> Conversion:
    """`files`: name -> text of one run, read together with its launch line; `model` and `on` say what they do not.

    Raises `SpecError` where a file cannot be read, none is a training configuration, no model is known, or no plan near the files' can be written.
    """
    target = TARGETS.get_or_raise(to, "--to")
    setup = read_setup(files, launch, {k: v for k, v in (("model", model), ("on", on)) if v})
    _readable(setup)
    described = to_spec(setup)
    if described is None:
        if model is None and setup.value("model.name") is None and setup.value("model.hidden_size") is None:
            raise SpecError("no file names a model", "--model", ["--model llama-3.1-8b"])
        raise SpecError(
            "no known model, or degrees and processes that contradict each other", ", ".join(files), ["--model", "trainwright check"]
        )
    _as_the_front_end_reduces(described.document, setup)
    source = resolve(validate(described.document))
    check_plan(source.model, source.cluster, source.job, source.plan)
    for limit in refused(source, target):
        if limit.field in ("model", "cluster.gpu"):  # another one of these is another run, not this one in other files
            raise SpecError(why(source, target, limit), limit.field)
    run = settled(mended(source, target), target)
    check_plan(run.model, run.cluster, run.job, run.plan)
    engine = _innermost(target, run)
    options = _rate(setup, run, _options(setup, engine, options or Options()))
    written = emit(run, target.name, options)
    rows = [
        *_contradictions(setup),
        *_fields(setup, source, run, target),
        *_extras(setup, engine, run, options, written),
        *_adam(setup, engine, run, options),
        *_habits(setup, source, engine, run),
        *_not_carried(setup),
    ]
    order = list(KINDS)
    formats = {str(r.document.name): r.format for r in setup.readings}
    return Conversion(target.name, written, tuple(sorted(rows, key=lambda r: order.index(r.kind))), formats)


def _as_the_front_end_reduces(document: dict[str, Any], setup: Setup) -> None:
    """Accelerate's FSDP plugin, the Trainer's as well, reduces gradients in the type of the products; FSDP2 by itself would in fp32."""
    training, framework = document["training"], document["strategy"].get("framework")
    front_end = semantics.engine_of(r.format for r in setup.readings) in ("trainer", "accelerate")
    if front_end and framework in ("fsdp1", "fsdp2") and "gradient_dtype" not in training:
        training["gradient_dtype"] = {"fp32": "fp32", "fp16": "fp16"}.get(training.get("precision", "bf16"), "bf16")


def _readable(setup: Setup) -> None:
    if not setup.readings:
        raise SpecError("nothing to read: no file and no launch line", "convert", ["trainwright convert ds_config.json --to fsdp"])
    for reading in setup.readings:
        for problem in reading.document.problems:
            if problem.fatal or problem.kind == "utf-16":
                where = reading.document.name + (f":{problem.line}" if problem.line else "")
                raise SpecError(problem.message, where)
        if reading.template:
            raise SpecError("is a template: what it says is decided when it is rendered; render it first", reading.document.name)
    if all(r.format == UNKNOWN or not r.facts for r in setup.readings):
        names = ", ".join(dict.fromkeys(r.document.name for r in setup.readings))
        raise SpecError("no training configuration that is known", names or "convert")


def _innermost(target: Target, run: Run) -> str:
    inner = engine_of(target, run)
    return _innermost(inner, run) if inner is not None else target.name


def _options(setup: Setup, engine: str, options: Options) -> Options:
    """Rate, clipping, AdamW's numbers: the source's, else those that its engine takes."""
    rate, clip = setup.value("training.learning_rate"), setup.value("training.clip")
    if isinstance(rate, (int, float)) and 0 < rate <= 1e3:
        options = replace(options, learning_rate=float(rate))
    own = semantics.ADAM.get(semantics.engine_of(r.format for r in setup.readings) or "")
    if own is not None:
        clip = own.clip if clip is None else clip
        options = replace(options, betas=own.betas, weight_decay=own.weight_decay)
    said = optimizer_numbers(setup)
    beta1, beta2 = said.get("beta1"), said.get("beta2")
    options = replace(
        options,
        betas=(beta1[0] if beta1 else options.betas[0], beta2[0] if beta2 else options.betas[1]),
        weight_decay=said["weight_decay"][0] if "weight_decay" in said else options.weight_decay,
    )
    if isinstance(clip, (int, float)) and clip >= 0:
        options = replace(options, clip=NO_CLIPPING if clip == 0 and engine in CLIPS_AT_ZERO else float(clip))
    return options


def _rate(setup: Setup, run: Run, options: Options) -> Options:
    """Warm-up, shape and end of the learning rate: the source's, else those that its engine takes. Another shape than the writers know is left to them."""
    own = semantics.RATE.get(semantics.engine_of(r.format for r in setup.readings) or "")
    shape, least = setup.value("training.lr_schedule", own), setup.value("training.least_learning_rate")
    warmup, share = setup.value("training.warmup_steps"), setup.value("training.warmup_share")
    if warmup is None and isinstance(share, (int, float)) and 0 < share < 1:
        warmup = round(share * steps(run))
    return replace(
        options,
        schedule=shape if shape in SHAPES else options.schedule,
        warmup_steps=int(warmup) if warmup is not None else 0 if own is not None else options.warmup_steps,
        least_learning_rate=float(least) if isinstance(least, (int, float)) else options.least_learning_rate,
    )


def optimizer_numbers(setup: Setup) -> dict[str, tuple[float, str, tuple[Any, ...]]]:
    """{"weight_decay" | "beta1" | "beta2": (value, place, path)} as any file of the set says it."""
    found: dict[str, tuple[float, str, tuple[Any, ...]]] = {}
    for reading in setup.readings:
        document = reading.document
        for path, value in _leaves(document.data) if reading.format != UNKNOWN else ():
            name = plain(path[-1])
            values: Any = value if isinstance(value, (list, tuple)) else [value]
            keys = ("beta1", "beta2") if name in ("betas", "adam_betas") and len(values) == 2 else (OPTIMIZER_KEYS.get(name),)
            for key, one in zip(keys, values, strict=False):
                read = number(one)
                if key is not None and read is not None and 0 <= read <= 1:
                    line = document.line(path)
                    found.setdefault(key, (float(read), document.name + (f":{line}" if line else ""), path))
    return found


def _fields(setup: Setup, source: Run, run: Run, target: Target) -> Iterator[Row]:
    """Every field of the run spec."""
    lost = set(left(target, run))
    for field in STATED:
        fact = _stated(setup, field)
        before = fact.value if fact is not None else dig(source.filled, field)
        after = dig(run.filled, field)
        place = str(fact.place) if fact is not None else ""
        if before is None and after is None:
            continue
        if field in lost:
            if fact is not None or (after is not None and not _same(after, DEFAULTS.get(field))):
                yield Row(field, "lost", before, None, "files of this kind do not hold it", place)
        elif not _same(before, after):
            yield Row(field, "changed" if before is not None else "added", before, after, _why(field, source, run, target), place)
        elif fact is None:
            if field in DECIDING or (field not in DERIVED and not _same(after, DEFAULTS.get(field))):
                yield Row(field, "assumed", None, after, _assumed(field, setup, source))
        else:
            yield Row(field, "kept", before, after, "", place)


def _assumed(field: str, setup: Setup, source: Run) -> str:
    if field.startswith("cluster.") and setup.asked.get("on"):
        return "as asked"
    if field in ("training.seq_len", "cluster.nodes", "cluster.gpus_per_node"):
        return "no file says it"
    if field == "training.global_batch_size":
        return "micro-batch x accumulation x data-parallel ranks"
    return f"what {source.plan.structure.framework} takes unless said"


def _stated(setup: Setup, field: str) -> Fact | None:
    return setup.fact(field) or (setup.fact(field.replace("cluster.", "launch.")) if field.startswith("cluster.") else None)


def _why(field: str, source: Run, run: Run, target: Target) -> str:
    said = [limit.why for limit in refused(source, target) if limit.field == field]
    if said:
        return f"{target.title} {said[0]}"
    frameworks = source.plan.structure.framework, run.plan.structure.framework
    if frameworks[0] != frameworks[1]:
        return f"follows from {frameworks[0]} -> {frameworks[1]}"
    return "follows from the other changes" if dig(source.filled, field) != dig(run.filled, field) else "as the files work out together"


def _extras(setup: Setup, engine: str, run: Run, options: Options, written: Files) -> Iterator[Row]:
    """What no plan holds and files say: rates, steps, clipping, time limits. The written files are read again, by the same reader."""
    again = read_setup(written)
    known = {
        "training.learning_rate": options.learning_rate,
        "training.clip": 0.0 if options.clip == NO_CLIPPING else options.clip,
        "training.accumulation": run.plan.accumulation,
        "training.steps": steps(run),
        **_written_rate(engine, run, options),
    }
    if "training.warmup_steps" in known and setup.value("training.warmup_share") is not None:
        known["training.warmup_share"] = setup.value("training.warmup_share")  # written as steps
    own = semantics.ADAM.get(semantics.engine_of(r.format for r in setup.readings) or "")
    for field in EXTRAS:
        fact, after = setup.fact(field), known.get(field, again.value(field))
        before = fact.value if fact is not None else own.clip if own is not None and field == "training.clip" else None
        place = str(fact.place) if fact is not None else ""
        if before is None and after is None:
            continue
        if before is None:
            if after or field not in RATES:  # no warm-up, a rate that ends at 0: nothing that anybody would miss
                yield Row(field, "assumed" if field in known else "added", None, after)
        elif after is None:
            yield Row(field, "lost", before, None, "the written files say nothing of it", place)
        else:
            why = NOTES.get(field, "") if field != "training.clip" or options.clip == NO_CLIPPING else ""
            yield Row(field, "kept" if _same(before, after) else "changed", before, after, why, place)


def _written_rate(engine: str, run: Run, options: Options) -> dict[str, Any]:
    """What the written files hold of the learning rate's course, in the source's fields; nothing where the engine's files have no place for it."""
    if engine not in RATE_OF:
        return {}
    rate = RATE_OF[engine](run, options)
    held = {"training.lr_schedule": rate.shape, "training.warmup_steps": rate.warmup}
    falls = rate.shape == "cosine" or (rate.shape == "linear" and engine not in LINEAR_ENDS_AT_ZERO)
    return held | (
        {"training.least_learning_rate": rate.least} if falls else {"training.least_learning_rate": 0.0} if rate.shape != "constant" else {}
    )


def _adam(setup: Setup, engine: str, run: Run, options: Options) -> Iterator[Row]:
    """Weight decay and betas, where the target's files hold them; Megatron and torchtitan know no betas for SGD, nor does anything else."""
    said = optimizer_numbers(setup)
    before = semantics.ADAM.get(semantics.engine_of(r.format for r in setup.readings) or "")
    after = {"weight_decay": options.weight_decay, "beta1": options.betas[0], "beta2": options.betas[1]}
    own = {"weight_decay": before.weight_decay, "beta1": before.betas[0], "beta2": before.betas[1]} if before else {}
    holds = engine in semantics.ADAM and run.job.optimizer in ("adamw", "lion", "adam8bit", "paged_adam8bit")
    for name, value in after.items():
        stated = said.get(name)
        source = stated[0] if stated else own.get(name)
        if not holds:
            if stated:
                yield Row(f"optimizer.{name}", "lost", source, None, "files of this kind do not hold it", stated[1])
        elif source is None:
            yield Row(f"optimizer.{name}", "assumed", None, value)
        else:
            why = "" if stated else "what its engine takes unless said"
            yield Row(f"optimizer.{name}", "kept" if _same(source, value) else "changed", source, value, why, stated[1] if stated else "")


def _habits(setup: Setup, source: Run, engine: str, run: Run) -> Iterator[Row]:
    fp16 = "fp16" in (source.job.precision, run.job.precision)
    before = semantics.engine_of(r.format for r in setup.readings)
    for topic, old, new in semantics.differences(before, engine, fp16):
        yield Row(topic, "changed", old, new, f"{before or 'the source'} and {engine} differ without being told")


def _contradictions(setup: Setup) -> Iterator[Row]:
    for field in sorted({f.field for r in setup.readings for f in r.facts}):
        facts = setup.facts(field)
        other = next((f for f in facts[1:] if not _same(f.value, facts[0].value)), None)
        if other is not None and field != "strategy.framework":
            yield Row(field, "contradicted", other.value, facts[0].value, f"{other.place} says otherwise", str(facts[0].place))


def _not_carried(setup: Setup) -> Iterator[Row]:
    """Keys of the source that made no fact."""
    for reading in setup.readings:
        document = reading.document
        if reading.format == UNKNOWN:
            if document.parent is None and not any(r.document.parent == document.name for r in setup.readings):
                yield Row(document.name, "not carried", None, None, "no training configuration that is known", document.name)
            continue
        used = {f.place.path for f in reading.facts if f.field != "strategy.framework"} | {
            path for _, _, path in optimizer_numbers(setup).values()
        }
        for path, value in _leaves(document.data):
            if path not in used and path[:-1] not in used:
                line = document.line(path)
                place = document.name + (f":{line}" if line else "")
                yield Row(".".join(str(p) for p in path), "not carried", value, None, "", place)


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    elif path:
        yield path, data


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool) and not isinstance(b, bool):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return json.dumps(a, default=str, sort_keys=True) == json.dumps(b, default=str, sort_keys=True)


__all__ = ["KINDS", "Conversion", "Row", "convert"]
