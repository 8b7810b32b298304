"""A user's own catalogue file: TOML with ``[[gpu]]``, ``[[price]]`` and ``[[model]]`` tables that add to the catalogue or override it.

```toml
[[gpu]]
id = "H100-cloud"            # a new name; or a known one, which is overridden
base = "H100-SXM-80GB"       # optional: everything not said here is as there
nic_default_gbps = 200
source = "contract of 2026-03"

[[price]]
gpu = "H100-SXM-80GB"
usd_per_gpu_hour = 2.10
source = "contract of 2026-03"

[[model]]
id = "ours-7b"
path = "ours/config.json"    # beside this file; or config = {model_type = "llama", ...}
```
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import SpecError, nearest, one_line

KINDS = ("gpu", "price", "model")
OTHERS = ("factor",)  # what a profile of `trainwright calibrate` holds beside
MOST_BYTES = 10 * 2**20


@dataclass(frozen=True)
class UserCatalog:
    """The tables of all files, in order; a later one overrides an earlier one."""

    gpus: tuple[Mapping[str, Any], ...] = ()
    prices: tuple[Mapping[str, Any], ...] = ()
    models: tuple[Mapping[str, Any], ...] = ()


def read_user_catalog(files: Sequence[str]) -> UserCatalog:
    """Raises `SpecError` for a file that cannot be read, is no TOML or has other tables than those."""
    read = [_tables(str(file), _stamp(str(file))) for file in files]
    return UserCatalog(*(tuple(t for tables in read for t in tables[kind]) for kind in KINDS))


def _stamp(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


@cache
def _tables(file: str, _stamp: int) -> dict[str, list[dict[str, Any]]]:
    where = one_line(file, 200)
    document = parse_toml(read_text(file), where)
    for key in document:
        if key not in (*KINDS, *OTHERS):
            raise SpecError(f"unknown table {key[:60]!r}", where, nearest(key, KINDS) or [f"[[{k}]]" for k in KINDS])
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        tables = document.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise SpecError(f"{kind} is no list of tables", where, [f"[[{kind}]]"])
        named = "gpu" if kind == "price" else "id"
        for table in tables:
            if not isinstance(table.get(named), str) or not table[named].strip():
                raise SpecError(f"a [[{kind}]] without {named}", where)
        found[kind] = [{**t, "_file": file} for t in tables]
    return found


def parse_toml(content: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is not valid TOML: {error}", where) from None
    except (RecursionError, ValueError, OverflowError):
        raise SpecError("is not valid TOML: nested too deeply or with a number too long", where) from None


def read_text(file: str) -> str:
    """A text file of at most 10 MiB."""
    path, where = Path(file), one_line(file, 200)
    try:
        if path.is_dir():
            raise SpecError("is a directory, not a file", where)
        if not path.is_file():
            raise SpecError("no such file" if not path.exists() else "is no regular file", where)
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(
                f"has {path.stat().st_size / 2**20:,.0f} MiB, more than the {MOST_BYTES // 2**20} that a configuration may have", where
            )
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where) from None
    if b"\0" in content[:4096]:
        raise SpecError("is a binary file, not text", where)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError("is not UTF-8 text", where) from None
