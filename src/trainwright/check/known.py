"""The keys that each engine knows, as its own source lists them: `keys/<format>.json`, with source and version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Keys:
    """`tables`: dotted table -> its keys ("" is the top); `refused`: tables whose unknown keys stop the engine (others are ignored in silence);
    `deprecated`: dotted key -> what replaces it, empty where nothing does."""

    source: str
    version: str
    tables: Mapping[str, frozenset[str]]
    refused: frozenset[str] = frozenset()
    deprecated: Mapping[str, str] | None = None

    def of(self, table: str = "") -> frozenset[str]:
        return self.tables.get(table, frozenset())


EMPTY = Keys("", "", {})


@cache
def keys(name: str) -> Keys:
    """The known keys of a format; `EMPTY` where no list is held."""
    file = resources.files(__package__).joinpath("keys", f"{name}.json")
    if not file.is_file():
        return EMPTY
    found = json.loads(file.read_text("utf-8"))
    tables = {k: frozenset(v) for k, v in found["tables"].items()}
    return Keys(found["source"], found["version"], tables, frozenset(found.get("refused", ())), found.get("deprecated") or {})
