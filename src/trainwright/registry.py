"""One folder, one registry: every module of a package that defines a given name is an entry of it.

``Registry("trainwright.schedules", "SCHEDULE")`` holds the value of ``SCHEDULE`` of every module in that folder, keyed by its ``name`` and its
``aliases``. Adding an entry is adding a file. Installed distributions may add entries through the entry-point group of the same name as the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import metadata
from typing import Any

from .errors import unknown


class Registry(Mapping[str, Any]):
    """The entries of a folder, by name; `get_or_raise` also knows aliases, and any case, with ``-`` and ``_`` alike."""

    def __init__(self, package: str, attribute: str, kind: str) -> None:
        self.package, self.attribute, self.kind = package, attribute, kind

    @cached_property
    def _entries(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        folder = importlib.import_module(self.package)
        names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if not m.name.startswith("_"))
        modules = [importlib.import_module(f"{self.package}.{n}") for n in names]
        values = [getattr(m, self.attribute) for m in modules if hasattr(m, self.attribute)]
        values += [p.load() for p in _entry_points().select(group=self.package)]
        for value in values:
            for entry in value if isinstance(value, (list, tuple)) else (value,):
                if found.setdefault(entry.name, entry) is not entry:
                    raise RuntimeError(f"two entries of {self.package} are called {entry.name!r}")
        return found

    @cached_property
    def _aliases(self) -> dict[str, str]:
        table: dict[str, str] = {}
        for name, entry in self._entries.items():
            for alias in (name, *getattr(entry, "aliases", ())):
                if table.setdefault(_plain(alias), name) != name:
                    raise RuntimeError(f"{alias!r} names two entries of {self.package}")
        return table

    def __getitem__(self, name: str) -> Any:
        found = self._entries.get(name)  # asked ten thousand times a search, nearly always by the name itself
        return self._entries[self._aliases[_plain(name)]] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_raise(self, name: str, where: str = "") -> Any:
        """The entry of that name or alias, or `SpecError` with the nearest names."""
        try:
            return self[name]
        except KeyError:
            raise unknown(self.kind, name, self._entries, where) from None


@cache
def _entry_points() -> Any:
    return metadata.entry_points()


def _plain(name: str) -> str:
    return str(name).lower().replace("_", "-").replace(" ", "-")
