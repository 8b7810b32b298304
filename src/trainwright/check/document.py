"""A file as a tree of plain values in which every key knows its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Path = tuple[str | int, ...]
Syntax = Literal["json", "yaml", "toml", "shell", "ini", "text"]

KINDS: Mapping[str, str] = {
    "broken": "the file's own parser refuses it (read on tolerantly where not fatal)",
    "too-large": "no configuration is that large",
    "binary": "no text",
    "encoding": "not UTF-8; read as Latin-1",
    "utf-16": "UTF-16, as some Windows programs save it",
    "bom": "begins with a byte order mark",
    "duplicate-key": "a key, or a flag of one command, stands twice; the last wins",
    "merge-marker": "an unresolved merge conflict",
    "template": "a Go, Helm or jinja template: what it says is decided when it is rendered",
    "placeholder": "a bare word or ${NAME} where JSON has a value: somebody substitutes it first",
    "comment": "a comment in JSON",
    "comma": "a comma missing, or one too many",
    "tag": "a YAML tag: kept as data, never run",
    "anchors": "aliases of aliases that unfold to more than a file can mean",
    "tab": "a tab where YAML wants spaces",
    "number": "a number as no parser of this syntax takes it",
    "lost-arguments": "arguments behind a command that had already ended: a backslash is missing or a comment swallowed it",
    "comment-argument": "a # inside a quoted list of arguments: no comment there, the program gets the words",
    "sourced": "reads another script that was not given",
    "unclosed": "a quote, a bracket or a block is never closed",
    "late-directive": "an #SBATCH line behind the first command",
    "arithmetic": "no number that the shell can compute with",
}


@dataclass(frozen=True)
class Problem:
    """What stopped, or disturbed, the reading of a file. `kind` is one of `KINDS`; `fatal`: nothing of the file could be read."""

    kind: str
    message: str
    line: int | None = None
    fatal: bool = False
    path: Path = ()


@dataclass(frozen=True)
class Document:
    """One file, or one part of a file that is written in another syntax (a JSON heredoc inside a shell script: `parent` names that file).

    `data` holds plain dicts, lists and scalars, aliases resolved; `lines` the line of each key, counted from 1 in the file. A part of a file
    carries the file's name and its own: `part` (``ds_config.json``, ``torchrun``, ``document 2``). `detail`: what a syntax has beyond data (a
    shell script's variables and commands).
    """

    name: str
    text: str
    syntax: Syntax
    data: Any = None
    lines: Mapping[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    parent: str | None = None
    part: str = ""
    detail: Any = None

    @cached_property
    def top(self) -> Mapping[str, Any]:
        """The keys at the top, lower case with ``-`` as ``_`` -> as written."""
        return {str(k).strip().lstrip("-").replace("-", "_").lower(): k for k in self.data} if isinstance(self.data, Mapping) else {}

    def line(self, path: Path) -> int | None:
        """Line of the key, or of the nearest key above it that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None
