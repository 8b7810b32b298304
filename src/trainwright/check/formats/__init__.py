"""One file a format: recognizes a document by its content and says what it means. A module with ``FORMAT`` is an entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...registry import Registry
from ..document import Document
from ..setup import Reading

FORMATS = Registry("trainwright.check.formats", "FORMAT", "format")


@dataclass(frozen=True)
class Format:
    """One kind of file.

    * `recognizes(document)`: 0 (no) to 1 (surely); the highest of all formats reads the file, so one key in common is never enough;
    * `read(document, context)`: what it means; `context` holds the launch line's and the other files' values, for ``auto`` and interpolation;
    * `parts(document)`: documents that stand inside it in another syntax (a container's command, a job's ``run:`` script).
    """

    name: str
    title: str
    recognizes: Callable[[Document], float]
    read: Callable[[Document, Mapping[str, Any]], Reading]
    aliases: tuple[str, ...] = ()
    source: str = ""
    parts: Callable[[Document], list[Document]] = lambda document: []
