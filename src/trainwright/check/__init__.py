"""Reads what people already have, and says what is wrong with it before a GPU is rented.

text -> `document` (a tree whose every key knows its line) -> `formats` (one file a format: recognizes it, says what it means) -> `setup` (one neutral
view of all files and the launch line together) -> `checks` (one file a check) -> `findings`. Nothing that is read is ever run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Report


class _Callable(ModuleType):
    """``trainwright.check`` is this package and, called, the verb: `trainwright.api.check` in the order of its arguments."""

    def __call__(self, files: Any, *, launch: str = "", model: Any = None, on: Any = None, ignore: Any = ()) -> Report:
        from .run import check

        return check(files, launch, model, on, ignore)


sys.modules[__name__].__class__ = _Callable
