"""K01, K28, K32: keys that are unknown, misspelt, removed, renamed, or another format's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from ...errors import nearest
from ..document import Path
from ..findings import Change, Check, Example, Finding
from ..known import keys as keys_of
from ..setup import Setup
from ..view import Value, View, plain
from ._renamed import DEPRECATED, REMOVED, Table
from ._tools import ERROR, NOTE, WARNING, drop, rename, said

# Engines whose configuration reader refuses what it does not know; others drop it in silence.
STRICT = ("deepspeed", "torchtitan", "nanotron", "accelerate", "torchrun")
NEIGHBOURS: Mapping[str, frozenset[str]] = {
    "deepspeed": frozenset((
        "zero_stage", "zero3_init_flag", "zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device", "distributed_type",
        "mixed_precision", "num_processes", "num_machines", "per_device_train_batch_size", "gradient_checkpointing", "learning_rate",
        "fsdp_config", "deepspeed_multinode_launcher", "max_grad_norm", "comms_config", "min_lr", "monitor_config", "fsdp", "warmup_ratio",
    )),
    "accelerate": frozenset(("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer", "scheduler", "bf16", "fp16",
        "zero_allow_untested_optimizer")),
    "trainer": frozenset(("train_micro_batch_size_per_gpu", "zero_optimization", "micro_batch_size", "zero_stage")),
}  # fmt: skip
LOSS_SCALE = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "consecutive_hysteresis",
    "fp16_scale_tolerance",
)


@cache
def vocabulary() -> Mapping[str, frozenset[str]]:
    """Keys that an engine's own repository uses beyond its lists of options: `known` has both."""
    text = resources.files("trainwright.check").joinpath("keys/vocabulary.json").read_text(encoding="utf-8")
    return {name: frozenset(row["keys"]) for name, row in json.loads(text).items()}


def unknown(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        seen: set[Path] = set()
        for finding in (*_removed(view), *_unread(view), *_near_misses(view), *_values(view)):
            if finding.place.path not in seen:
                seen.add(finding.place.path)
                yield finding


def _tables(view: View, tables: Mapping[str, Table]) -> Table:
    """The table of a format; what TRL and the Trainer read is one namespace."""
    if view.format in ("trainer", "trl"):
        return {**tables.get("trainer", {}), **tables.get("trl", {})}
    if view.format == "llama_factory":
        return {**{k: v for k, v in tables.get("trainer", {}).items() if k != "torch_dtype"}, **tables.get("llama_factory", {})}
    if view.format == "megatron" and _fork(view):
        return {}
    return tables.get(view.format, {})


def _fork(view: View) -> bool:
    """Megatron-DeepSpeed and other forks keep the old arguments."""
    text = view.document.text
    return "deepspeed" in text.lower() or "torch.distributed.launch" in text or "--DDP-impl" in text or "--data-impl" in text


def _removed(view: View) -> Iterator[Finding]:
    table = _tables(view, REMOVED)
    if not table:
        return
    for key in _keys(view):
        name = plain(key.path[-1])
        if name not in table or (view.format == "deepspeed" and len(key.path) > 2):
            continue
        new, since = table[name]
        if new and view.get(new) is not None and plain(new) != name:
            continue
        severity = ERROR if view.format in ("deepspeed", "nanotron") else WARNING
        when = f"is not read any more (since {since})" if since else "is not a key of this format"
        changes = (rename(view, key, new),) if new and "." not in new else (drop(view, key),)
        yield said(view, key, "K01", severity, f"{key.path[-1]} {when}.", f"Call it {new}." if new else "Remove it.", *changes)


# Formats whose reader knows every key there is; a program's own arguments, and configurations that instantiate classes, may hold more.
CLOSED = ("deepspeed", "accelerate", "torchtitan", "nanotron", "axolotl", "llama_factory", "gpt_neox", "torchrun")


def _unread(view: View) -> Iterator[Finding]:
    """What the format's own schema does not know."""
    known = _known(view)
    for path in view.reading.unknown:
        name = plain(path[-1])
        if (
            view.format not in CLOSED
            or name in NEIGHBOURS.get(view.format, ())
            or name in _tables(view, DEPRECATED)
            or name.startswith("_")
            or _loss_scale(path)
        ):
            continue
        near = nearest(name, known) if known else []
        close = bool(near) and _similar(name, near[0])
        refused = ".".join(map(str, path[:-1])) in keys_of(view.format).refused
        effect = "the engine refuses it" if refused else "nothing reads it"
        changes = (Change(view.document.name, path, rename=near[0]),) if close else ()
        severity = ERROR if refused else WARNING if close or view.format in STRICT else NOTE
        yield Finding(
            "K01",
            severity,
            view.place(path),
            f"{path[-1]} is no key that {view.format} knows: {effect}.",
            f"Did you mean {near[0]}?" if near else "Remove it.",
            changes,
        )


# Formats whose keys stand in the files of another: a Trainer's program may be TRL's, and LLaMA-Factory takes the Trainer's arguments.
TOGETHER: Mapping[str, tuple[str, ...]] = {"trainer": ("trl",), "trl": ("trainer",), "llama_factory": ("trainer",), "hyperpod": ("nemo",)}


def _known(view: View) -> frozenset[str]:
    names = (view.format, *TOGETHER.get(view.format, ()))
    listed = frozenset(plain(k) for name in names for keys in keys_of(name).tables.values() for k in keys)
    return listed.union(*(vocabulary().get(name, frozenset()) for name in names))


def _near_misses(view: View) -> Iterator[Finding]:
    """A key that the engine's own repository never uses, a letter away from one that it does."""
    known = _known(view)
    if not known or (view.format == "megatron" and _fork(view) and view.document.syntax != "shell"):
        return
    paths = set(view.reading.unknown) if view.format in CLOSED else set()  # those have been named already
    for key in _keys(view):
        name = plain(key.path[-1])
        if len(name) < 10 or name in known or key.path in paths or not name.replace("_", "").isalnum():
            continue
        near = sorted((n for n in known if _like(name, n) and _similar(name, n)), key=lambda n: _distance(name, n))
        if near:
            yield said(
                view,
                key,
                "K01",
                WARNING,
                f"{key.path[-1]} looks like a misspelling: {view.format} reads {near[0]}.",
                f"Call it {near[0]}.",
                rename(view, key, near[0]),
            )


def _like(name: str, other: str) -> bool:
    """A quick look before the letters are counted: as long, and the same beginning or end."""
    return abs(len(name) - len(other)) <= 2 and (name[:4] == other[:4] or name[-4:] == other[-4:])


def _similar(name: str, other: str) -> bool:
    """One or two letters apart, in a word long enough for that to be no accident."""
    if name == other or abs(len(name) - len(other)) > 2 or min(len(name), len(other)) < 6:
        return False
    return _distance(name, other) <= (1 if len(name) < 12 else 2) and not _differ_in_number(name, other)


def _differ_in_number(name: str, other: str) -> bool:
    return [c for c in name if c.isdigit()] != [c for c in other if c.isdigit()]


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def _values(view: View) -> Iterator[Finding]:
    """fp16's smallest scale is a whole number for DeepSpeed's reader."""
    key = view.get("fp16.min_loss_scale")
    if view.format == "deepspeed" and key is not None and isinstance(key.value, float) and key.value != int(key.value):
        yield said(
            view,
            key,
            "K01",
            ERROR,
            f"min_loss_scale {key.value} is no whole number: current DeepSpeed refuses it.",
            "Use 1.",
            Change(view.document.name, key.path, 1),
        )


def _keys(view: View) -> list[Value]:
    """Every key once, in the order of the file."""
    found: dict[Path, Value] = {}
    for leaves in view.names.values():
        for leaf in leaves:
            found.setdefault(leaf.path, leaf)
    return [leaf for leaf in found.values() if isinstance(leaf.path[-1], str)]


def _loss_scale(path: Path) -> bool:
    return len(path) > 1 and path[-2] in ("bf16", "bfloat16") and path[-1] in LOSS_SCALE


def neighbours(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen("deepspeed", "accelerate", "trainer", "trl"):
        foreign = NEIGHBOURS.get("trainer" if view.format == "trl" else view.format, frozenset())
        for key in _keys(view):
            name = plain(key.path[-1])
            if view.format == "accelerate" and key.path[:1] == ("deepspeed_config",) and name in foreign and len(key.path) == 2:
                yield said(
                    view, key, "K28", WARNING, f"{key.path[-1]} belongs into a DeepSpeed JSON; Accelerate's deepspeed_config does not read it.",
                    "Put it into a JSON and name that with deepspeed_config_file.",
                )  # fmt: skip
            elif view.format != "accelerate" and name in foreign and len(key.path) == 1:
                yield said(
                    view,
                    key,
                    "K28",
                    WARNING,
                    f"{key.path[-1]} is no key of a {view.format} file: nothing reads it.",
                    "Remove it.",
                    drop(view, key),
                )
        for leaf in _keys(view):
            if view.format == "deepspeed" and _loss_scale(leaf.path):
                yield said(
                    view,
                    leaf,
                    "K28",
                    ERROR,
                    f"{leaf.path[-1]} is fp16's; bf16 has no loss scale and DeepSpeed refuses it.",
                    "Remove it.",
                    drop(view, leaf),
                )
        yield from _both(view)


def _both(view: View) -> Iterator[Finding]:
    """Accelerate: a DeepSpeed file and keys that it owns."""
    file = view.get("deepspeed_config_file")
    if view.format != "accelerate" or file is None or not file.value:
        return
    for name in (
        "zero_stage",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_param_device",
        "zero3_save_16bit_model",
    ):
        key = view.get(name)
        if key is not None and key.value not in (None, "", "none"):
            yield said(
                view,
                key,
                "K28",
                ERROR,
                f"{name} beside deepspeed_config_file: Accelerate stops, the file owns it.",
                "Remove it here.",
                drop(view, key),
            )


def aliases(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        table = _tables(view, DEPRECATED)
        for key in _keys(view) if table else ():
            name = plain(key.path[-1])
            if name not in table or (name == "bfloat16" and not isinstance(key.value, dict)):
                continue
            new, _ = table[name]
            what = f"{key.path[-1]} is the old name" + (f" of {new}" if new else "") + " (deprecated), still mapped by some versions."
            changes = (
                (rename(view, key, new),)
                if new and "." not in new and not (name.startswith("cpu_offload")) and name != "adafactor"
                else _offload(view, key)
            )
            yield said(
                view,
                key,
                "K32",
                WARNING if view.format == "deepspeed" else NOTE,
                what,
                f"Call it {new}." if new else "Remove it.",
                *changes,
            )


def _offload(view: View, key: Value) -> tuple[Change, ...]:
    """cpu_offload true is a block of its own today; false is nothing."""
    if plain(key.path[-1]) == "cpu_offload" and view.format == "deepspeed":
        put = Change(view.document.name, (*key.path[:-1], "offload_optimizer"), {"device": "cpu", "pin_memory": True})
        return (drop(view, key), put) if key.value is True else (drop(view, key),)
    return ()


CHECK = (
    Check(
        "K01", "unknown, misspelt, renamed or removed keys", unknown,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "zero_optimization": {\n    "stage": 3,\n    '
            '"stage3_param_persistance_threshold": 1e5\n  }\n}\n'}),
        "error where the engine refuses the key, warning where it is dropped in silence or looks misspelt, note where nothing near it is known",
        "a _comment key",
    ),
    Check(
        "K28", "a key of a neighbouring format", neighbours,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "bf16": {"enabled": true, "loss_scale": 0},\n  '
            '"zero_optimization": {"stage": 2}\n}\n'}),
        "error where the engine refuses it, warning where nothing reads it",
    ),
    Check(
        "K32", "a deprecated name that is still mapped", aliases,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "zero_optimization": {\n    "stage": 2,\n    "cpu_offload": true\n  }\n}\n'}),
        "warning in DeepSpeed files, note elsewhere",
    ),
)  # fmt: skip
