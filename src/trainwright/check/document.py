"""A file as a tree of plain values in which every key knows its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Path = tuple[str | int, ...]
Syntax = Literal["json", "yaml", "toml", "shell", "ini", "text"]


@dataclass(frozen=True)
class Problem:
    """What stopped, or disturbed, the reading of a file: `kind` is a stable word such as ``broken``, ``duplicate-key``, ``merge-marker``, ``template``."""

    kind: str
    message: str
    line: int | None = None
    fatal: bool = False
    path: Path = ()


@dataclass(frozen=True)
class Document:
    """One file, or one part of a file that is written in another syntax (a JSON heredoc inside a shell script: `parent` names that file).

    `data` holds plain dicts, lists and scalars, aliases and interpolations resolved; `lines` the line of each key, counted from 1 in the file.
    """

    name: str
    text: str
    syntax: Syntax
    data: Any = None
    lines: Mapping[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    parent: str | None = None

    def line(self, path: Path) -> int | None:
        """Line of the key, or of the nearest key above it that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None
