"""Models: ``models.json`` lists them, ``models/<family>/<name>.json`` is the configuration of each in Hugging Face's own keys.

Each entry has the name on the hub, aliases, the published number of parameters where one was published, and what that number is and
where the shapes come from. A published number that differs from the sum over the blocks says in ``reason`` by what, and the tests hold it to that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import SpecError, nearest, one_line, unknown
from ..models import build_model
from ..models.by_size import SIZE, model_of_size
from ..spec.model import ModelSpec
from . import tables
from .user_files import read_text, read_user_catalog

MODEL_KEYS = ("id", "aliases", "path", "config", "source")


def model_rows(catalog_files: Sequence[str] = ()) -> dict[str, Mapping[str, Any]]:
    """Every entry by id; a user's files override by id and add."""
    found: dict[str, Mapping[str, Any]] = dict(tables.document("models.json"))
    for table in read_user_catalog(catalog_files).models if catalog_files else ():
        where = f"{table['_file']}: model {table['id'][:40]!r}"
        for key in table:
            if key not in MODEL_KEYS and key != "_file":
                raise SpecError(f"unknown key {key[:60]!r}", where, nearest(key, MODEL_KEYS) or MODEL_KEYS)
        if ("path" in table) == ("config" in table):
            raise SpecError("needs either path or config", where)
        found[table["id"]] = table
    return found


def load_model(reference: str | Mapping[str, Any], name_hint: str = "", catalog_files: Sequence[str] = ()) -> ModelSpec:
    """A model from what a user names it by: a catalogue id, an alias or the name on the hub; a path to a ``config.json`` or to a folder that holds
    one; a table of its keys; or a bare size such as ``7B`` (`trainwright.models.by_size`).

    Raises `SpecError`, one line, for an unknown name (with the nearest), a file that is missing, empty, binary, too large, no JSON or nested too
    deeply, and for whatever the family refuses.
    """
    if isinstance(reference, Mapping):
        return build_model(reference, name_hint or _name_in(reference))
    if not isinstance(reference, str) or not reference.strip():
        raise SpecError(f"{str(reference)[:40]!r} names no model", name_hint or "model", ["llama-3.1-8b", "7B", "path/to/config.json"])
    reference = reference.strip()
    found = model_rows(catalog_files)
    known = _names(found) if catalog_files else _shipped()
    if len(reference) <= 200 and tables.plain(reference) in known:
        return _from_catalog(known[tables.plain(reference)], found)
    if re.fullmatch(SIZE, reference):
        return model_of_size(reference)
    if _is_path(reference):
        return build_model(read_config(reference), name_hint or _name_of(reference))
    near = nearest(tables.plain(reference[:80]), known)
    raise unknown("model", reference, [known[n] for n in near] or found, name_hint or "model")


def needs_no_file(reference: str) -> bool:
    """Whether `load_model` knows the text by itself: an id, an alias, a name on the hub, or a size."""
    plain = reference.strip()[:201]
    return bool(re.fullmatch(SIZE, plain)) or (len(plain) <= 200 and tables.plain(plain) in _shipped())


@cache
def _shipped() -> dict[str, str]:
    return _names(model_rows())


def _names(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return tables.index((i, [row.get("hf_id") or "", *_aliases(row)]) for i, row in rows.items())


def _aliases(row: Mapping[str, Any]) -> list[str]:
    aliases = row.get("aliases") or []
    return [str(a) for a in aliases] if isinstance(aliases, (list, tuple)) else [str(aliases)]


def _from_catalog(name: str, found: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
    row = found[name]
    if "family" in row:
        return build_model(tables.document("models", row["family"], f"{name}.json"), name)
    if "config" in row:
        if not isinstance(row["config"], Mapping):
            raise SpecError("config is no table", f"{row['_file']}: model {name!r}")
        return build_model(row["config"], name)
    return build_model(read_config(str(Path(row["_file"]).parent / str(row["path"]))), name)


def _is_path(reference: str) -> bool:
    try:
        return reference.endswith(".json") or reference.startswith((".", "/", "~")) or Path(reference).exists()
    except (OSError, ValueError):
        return False


def _file(path: str) -> Path:
    """The path with the user's home put in for ``~``; as it stands where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _name_of(path: str) -> str:
    """The folder's name for a ``config.json``, the file's own without its ending for any other."""
    resolved = _file(path)
    if resolved.suffix != ".json":
        return one_line(resolved.name or "model", 80)
    return one_line(resolved.parent.name or "model" if resolved.stem == "config" else resolved.stem, 80)


def _name_in(config: Mapping[str, Any]) -> str:
    given = config.get("_name_or_path")
    return one_line(given, 80).rstrip("/").rpartition("/")[2] if isinstance(given, str) and given.strip() else ""


def read_config(path: str) -> dict[str, Any]:
    """A ``config.json``, or the one in a folder, as a table."""
    file = _file(path)
    try:
        folder = file.is_dir()
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", one_line(path, 120)) from None
    if folder:
        if not (file / "config.json").is_file():
            raise SpecError("is a directory without a config.json", one_line(path, 200))
        file = file / "config.json"
    where = one_line(file, 200)
    content = read_text(str(file))
    if not content.strip():
        raise SpecError("is empty", where)
    try:
        config = json.loads(content)
    except json.JSONDecodeError as error:
        raise SpecError(f"is not valid JSON: {error.msg} in line {error.lineno}", where) from None
    except (RecursionError, ValueError):
        raise SpecError("is not valid JSON: nested too deeply or with a number too long", where) from None
    if not isinstance(config, dict):
        raise SpecError(f"holds {type(config).__name__}, not a table of keys", where)
    return config


def list_models(catalog_files: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One plain row a model, for tables; parameters are sums over the blocks."""
    listed = []
    found = model_rows(catalog_files)
    for name, row in found.items():
        model = _from_catalog(name, found)
        listed.append(
            {
                "id": name,
                "family": model.family,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "layers": model.num_layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "kv_heads": model.kv_heads,
                "vocab": model.vocab,
                "experts": model.experts or None,
                "experts_per_token": model.top_k or None,
                "max_positions": model.max_positions,
                "hf_id": row.get("hf_id") or "",
                "published_parameters": row.get("published"),
                "source": str(row.get("source") or row.get("_file") or ""),
            }
        )
    return listed
