"""Calls computed in processes of their own, so that one which never ends can be ended: a line of JSON in, a line of JSON out.

python -m trainwright.mcp.worker     # {"tool": "memory", "arguments": {...}} -> {"answer": {...}} or {"error": "one line"}
"""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..errors import SpecError, TrainwrightError, nearest, one_line

READY = "ready"
DEEPEST = 60  # nested tables of the arguments; a run spec has four


def finite(value: Any) -> Any:
    """Numbers that JSON has no form for (infinite, not a number) as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def depth(value: Any) -> int:
    """How deep tables and lists are nested; counts without recursion."""
    deepest, level = 0, [value]
    while level and deepest <= DEEPEST:
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level, deepest = [x for values in inner for x in values], deepest + 1
    return deepest


def checked(tool: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the types of the tool's parameters. Raises `SpecError` for the first that is wrong, missing or unknown."""
    named(tool, arguments)
    hints, found = get_type_hints(tool, include_extras=True), {}
    for name, value in arguments.items():
        try:
            found[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            raise SpecError(f"{one_line(repr(value), 60)}: {one_line(first['msg'], 120)}", name) from None
    return found


def named(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises `SpecError` for an argument that the tool has not, and for one that it needs and is not there."""
    known = inspect.signature(tool).parameters
    for name in arguments:
        if name not in known:
            raise SpecError(f"unknown argument {name[:60]!r}", tool.__name__, nearest(name, known) or list(known))
    for name, parameter in known.items():
        if name not in arguments and parameter.default is inspect.Parameter.empty:
            raise SpecError("is missing", f"{tool.__name__}: {name}")


def answer(line: str) -> dict[str, Any]:
    """What one request gets. Never raises: a mistake of the caller and one of this program are both one line."""
    from .tools import TOOLS

    try:
        request = json.loads(line)
        tool = {t.__name__: t for t in TOOLS}[request["tool"]]
        found = finite(tool(**checked(tool, request["arguments"])))
        json.dumps(found, allow_nan=False)
        return {"answer": found}
    except TrainwrightError as error:
        return {"error": one_line(error, 1000)}
    except MemoryError:
        return {"error": "this machine's memory is too small for that"}
    except RecursionError:
        return {"error": "the input is nested too deeply"}
    except Exception as error:
        return {"error": f"a fault of this program, not of the input: {type(error).__name__}: {one_line(error, 300)}"}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers line by line, ends as soon as nobody asks any more (even in the middle of a call)."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work() -> None:
        while True:
            answers.write(json.dumps(answer(waiting.get())) + "\n")
            answers.flush()

    threading.Thread(target=work, daemon=True).start()
    for line in requests:
        waiting.put(line)
    with suppress(OSError):
        answers.flush()
    os._exit(0)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever prints does not disturb the answers
    from . import tools  # noqa: F401  what is imported here is not part of the first call's time

    answers.write(json.dumps(READY) + "\n")
    answers.flush()
    serve(sys.stdin, answers)
