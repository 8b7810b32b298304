"""How a format says its facts: short ways from a document's keys to fields of the run spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..document import Document, Path
from ..known import Keys
from ..setup import Fact, Place, Reading

FRAMEWORK = "strategy.framework"
ON = frozenset(("true", "yes", "on", "1"))
OFF = frozenset(("false", "no", "off", "0", "none", "null", ""))
OPEN = re.compile(
    r"\$\{?[A-Za-z_(]|\$\d|^\?\?\?$|^<(?:your|path|insert|fill|replace|specify|model|name|data)[^<>]*>$|\{\{|__template__|"
    r"^(?:TODO|FIXME|CHANGE_?ME|XXX+)$|/path/to/",
    re.IGNORECASE,
)


def number(value: Any) -> float | int | None:
    """A number as JSON, YAML 1.1 (2e-5 is text), TOML, argparse (500_000) write it; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return value if abs(value) < 1e30 else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    bare = value.strip().replace("_", "")
    if not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", bare):
        return None
    found = float(bare)
    return int(found) if re.fullmatch(r"[+-]?\d+", bare) and abs(found) < 1e18 else found


def whole(value: Any) -> int | None:
    """A whole number above zero (1e3 as well)."""
    found = number(value)
    return int(found) if found is not None and 0 < found < 1e18 and found == int(found) else None


def flag(value: Any) -> bool | None:
    """A switch, however it is written; None where it is none."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return bool(value)
    if isinstance(value, str):
        low = value.strip().lower()
        return True if low in ON else False if low in OFF else None
    return None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def is_open(value: Any) -> bool:
    """Something that another file, the environment or a person fills in."""
    return isinstance(value, str) and len(value) < 2000 and "\n" not in value and (value == "auto" or bool(OPEN.search(value)))


def plain(name: object) -> str:
    return str(name).strip().lstrip("-").replace("-", "_").lower()


class Facts:
    """Collects the facts of one document. Keys are found with ``-`` and ``_`` alike; a path may be given from any depth."""

    def __init__(self, document: Document, rank: int = 0) -> None:
        self.document, self.rank = document, rank
        self.found: list[Fact] = []
        self.open: list[Path] = []
        self.indices: dict[int, Mapping[str, Any]] = {}

    def path(self, *names: str) -> Path | None:
        """The real path of a table or key, None where it is not there."""
        here: Any = self.document.data
        path: Path = ()
        for name in names:
            if not isinstance(here, Mapping):
                return None
            key = name if name in here else self.index(here).get(plain(name))
            if key is None:
                return None
            here, path = here[key], (*path, key)
        return path

    def index(self, table: Mapping[Any, Any]) -> Mapping[str, Any]:
        """A table's keys by their plain names."""
        if table is self.document.data:
            return self.document.top
        if id(table) not in self.indices:
            self.indices[id(table)] = {plain(k): k for k in table}
        return self.indices[id(table)]

    def get(self, *names: str) -> Any:
        path = self.path(*names)
        return None if path is None else dig(self.document.data, path)

    def has(self, *names: str) -> bool:
        return self.path(*names) is not None

    def place(self, path: Path = ()) -> Place:
        return Place(self.document.name, self.document.line(path), path)

    def say(self, field: str, value: Any, path: Path | None = (), raw: Any = None, rank: int | None = None) -> None:
        """One fact; None says nothing."""
        if value is not None:
            self.found.append(
                Fact(field, value, self.place(path or ()), value if raw is None else raw, self.rank if rank is None else rank)
            )

    def take(self, field: str, convert: Callable[[Any], Any], *choices: str | tuple[str, ...]) -> Any:
        """The first of these keys that is there, converted; an open value is noted as open."""
        for choice in choices:
            names = (choice,) if isinstance(choice, str) else choice
            path = self.path(*names)
            if path is None:
                continue
            raw = dig(self.document.data, path)
            if is_open(raw):
                self.open.append(path)
                return None
            value = convert(raw)
            self.say(field, value, path, raw)
            return value
        return None

    def table(self, rows: Iterable[tuple[str, Callable[[Any], Any], tuple[str | tuple[str, ...], ...]]]) -> None:
        for field, convert, choices in rows:
            self.take(field, convert, *choices)

    def reading(self, name: str, **more: Any) -> Reading:
        filled = name in ("deepspeed", "accelerate")  # elsewhere "auto" is a choice of the engine
        rest = [p for p in every_open(self.document.data) if p not in self.open and (filled or dig(self.document.data, p) != "auto")]
        return Reading(self.document, name, tuple(self.found), open=(*self.open, *rest), **more)


def dig(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def every_open(data: Any, path: Path = (), depth: int = 0) -> list[Path]:
    """Paths of all open values, at most a thousand."""
    found: list[Path] = []
    if depth > 20:
        return found
    items: Iterable[tuple[Any, Any]] = (
        data.items() if isinstance(data, Mapping) else enumerate(data[:200]) if isinstance(data, list) else ()
    )
    for key, value in items:
        if isinstance(value, (Mapping, list)):
            found += every_open(value, (*path, key), depth + 1)
        elif is_open(value):
            found.append((*path, key))
        if len(found) > 1000:
            return found
    return found


def unknown_keys(document: Document, known: Keys, normalize: Callable[[Any], str] = str) -> tuple[Path, ...]:
    """Paths of keys in tables that the format lists, and that it does not list."""
    found: list[Path] = []
    tables = {"": (), **{t: tuple(t.split(".")) for t in known.tables if t}}
    for table, path in tables.items():
        here = document.data
        for key in path:
            here = here.get(key) if isinstance(here, Mapping) else None
        if isinstance(here, Mapping):
            listed = known.of(table)
            deprecated = known.deprecated or {}
            for key in here:
                dotted = f"{table}.{key}" if table else str(key)
                if listed and normalize(key) not in listed and dotted not in deprecated and normalize(key) not in deprecated:
                    found.append((*path, key))
    return tuple(found)


def misspelt(paths: Iterable[Path], listed: Iterable[str], normalize: Callable[[Any], str] = plain) -> tuple[Path, ...]:
    """Those of the paths whose key is a letter or two from a listed one: a program may have options of its own, so no other unknown key is a fault."""
    import difflib

    names = [n for n in listed if len(n) > 7]
    return tuple(p for p in paths if len(str(p[-1])) > 7 and difflib.get_close_matches(normalize(p[-1]), names, 1, 0.92))


def share(document: Document, names: Iterable[str]) -> int:
    """How many of these keys stand at the top of the document."""
    if not isinstance(document.data, Mapping):
        return 0
    return sum(plain(n) in document.top for n in names)


def launched(document: Document, *kinds: str) -> bool:
    """Whether the document is a layer of a command, of one of these kinds."""
    return document.syntax == "shell" and getattr(document.detail, "kind", None) in kinds


TYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16", "amp_bf16": "bf16", "bf16_with_fp8": "fp8",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16", "amp_fp16": "fp16", "torch.float16": "fp16", "16-true": "fp16",
    "fp32": "fp32", "float32": "fp32", "no": "fp32", "32": "fp32", "32-true": "fp32", "torch.float32": "fp32", "fp8": "fp8", "amp_fp8": "fp8",
}  # fmt: skip


def precision(value: Any) -> str | None:
    """A type's name as any of these engines writes it."""
    return TYPES.get(str(value).strip().lower()) if value is not None and not isinstance(value, bool) else None


def optimizer(value: Any) -> str | None:
    """An optimizer's name -> the run spec's word."""
    low = str(value).lower() if isinstance(value, str) else ""
    if not low:
        return None
    if "8bit" in low or "8_bit" in low:
        return ("paged_" if "paged" in low else "") + "adam8bit" if "adam" in low else None
    for word in ("adafactor", "lion", "muon", "sgd"):
        if word in low:
            return word
    return "adamw" if "adam" in low else None


def schedule(value: Any) -> str | None:
    """A scheduler's name -> constant, linear or cosine; another name as it stands."""
    low = str(value).rpartition(".")[2].lower() if isinstance(value, str) else ""
    for word, shape in (("cosine", "cosine"), ("linear", "linear"), ("warmupdecay", "linear"), ("constant", "constant")):
        if word in low:
            return shape
    return "constant" if low == "warmuplr" else low[:40] or None


def attention(value: Any) -> str | None:
    low = str(value).lower()
    if low in ("true", "flash", "flash_attention_2", "flash_attention_3", "fa2", "fa3", "flash_attention", "flash_2"):
        return "flash"
    return {"sdpa": "flash", "eager": "eager", "fused": "efficient", "unfused": "eager", "xformers": "efficient"}.get(low)


MODEL = {
    "hidden_size": ("hidden_size", "hidden-size", "n_embd", "dim", "d_model"),
    "num_hidden_layers": ("num_layers", "num-layers", "num_hidden_layers", "n_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "num-attention-heads", "n_heads", "n_head"),
    "num_key_value_heads": ("num_query_groups", "num-query-groups", "num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("ffn_hidden_size", "ffn-hidden-size", "intermediate_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size", "vocab-size"),
    "max_position_embeddings": ("max_position_embeddings", "max-position-embeddings", "n_positions"),
    "head_dim": ("kv_channels", "kv-channels", "head_dim"),
    "num_experts": ("num_experts", "num-experts", "num_moe_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("moe_router_topk", "moe-router-topk", "num_experts_per_tok"),
}


GATED = ("swiglu", "hidden_act", "activation", "activation_func", "gated_linear_unit", "glu_activation", "is_llama_config")


def model(facts: Facts, *table: str) -> None:
    """Sizes of the model, under config.json's own names."""
    for field, names in MODEL.items():
        facts.take(f"model.{field}", whole, *((*table, n) for n in names))
    for name in GATED:
        path = facts.path(*table, name)
        value = dig(facts.document.data, path) if path else None
        if path and (flag(value) or str(value).lower() in ("silu", "swiglu", "fast-swiglu", "swish")):
            facts.say("model.hidden_act", "silu", path, value)
            return
