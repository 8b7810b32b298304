"""OmegaConf's interpolations in data that was read: ``${a.b}``, ``${.x}``, ``${..x}``, resolvers, ``${oc.env:X,default}``, Primus' ``${X:default}``.

What cannot be known (the environment, a file that was not given) stays as it is written, and counts as open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..document import Document, Path

MOST = 5_000  # interpolations of one document
_ENV = re.compile(r"[A-Z_][A-Z0-9_]*$")


def _numbers(values: list[Any]) -> list[float]:
    found = []
    for v in values:
        if isinstance(v, bool) or not isinstance(v, (int, float, str)):
            raise ValueError("no number")
        found.append(float(v))
    return found


def _product(values: list[float]) -> float:
    result = 1.0
    for v in values:
        result *= v
    return result


RESOLVERS: Mapping[str, Callable[[list[float]], float]] = {
    "multiply": _product,
    "mult": _product,
    "mul": _product,
    "add": sum,
    "sum": sum,
    "subtract": lambda v: v[0] - v[1],
    "divide": lambda v: v[0] / v[1],
    "div": lambda v: v[0] / v[1],
    "divide_floor": lambda v: v[0] // v[1],
    "int_div": lambda v: v[0] // v[1],
    "divide_ceil": lambda v: -(-v[0] // v[1]),
    "max": max,
    "min": min,
}


class _Unknown(Exception):
    pass


def resolved(document: Document) -> Document:
    """The document with every interpolation filled that its own values decide."""
    if "${" not in document.text and "$(" not in document.text:
        return document
    resolver = _Resolver(document.data)
    return replace(document, data=resolver.walk(document.data, ()))


class _Resolver:
    def __init__(self, root: Any) -> None:
        self.root, self.count = root, 0

    def walk(self, data: Any, path: Path) -> Any:
        if isinstance(data, dict):
            return {k: self.walk(v, (*path, k)) for k, v in data.items()}
        if isinstance(data, list):
            return [self.walk(v, (*path, i)) for i, v in enumerate(data)]
        return self.value(data, path, 0) if isinstance(data, str) and "${" in data else data

    def value(self, text: str, path: Path, depth: int) -> Any:
        """The filled text, typed where the whole text is one interpolation; unchanged where a part of it cannot be known."""
        spans = _spans(text)
        if not spans or depth > 20 or len(text) > 20_000:
            return text
        pieces: list[Any] = []
        at = 0
        for begin, end in spans:
            self.count += 1
            if self.count > MOST:
                return text
            pieces.append(text[at:begin])
            try:
                found = self.one(text[begin + 2 : end - 1], path, depth + 1)
            except (_Unknown, ValueError, ZeroDivisionError, OverflowError, IndexError):
                found = text[begin:end]
            if len(spans) == 1 and begin == 0 and end == len(text):
                return found
            pieces.append(str(found))
            at = end
        return "".join([*map(str, pieces), text[at:]])[:20_000]

    def one(self, inner: str, path: Path, depth: int) -> Any:
        """What stands between ``${`` and ``}``."""
        filled = self.value(inner, path, depth) if "${" in inner else inner
        if not isinstance(filled, str):
            raise _Unknown
        if "${" in filled:
            raise _Unknown
        name, colon, rest = filled.partition(":")
        if not colon:
            return self.lookup(name.strip(), path, depth)
        return self.call(name.strip(), rest, path, depth)

    def call(self, name: str, rest: str, path: Path, depth: int) -> Any:
        arguments = [_typed(a) for a in _split(rest)]
        if name in RESOLVERS:
            result = RESOLVERS[name](_numbers(arguments))
            return int(result) if result == int(result) and abs(result) < 1e18 else result
        if name in ("oc.env", "env"):
            if len(arguments) > 1:
                return arguments[1]
            raise _Unknown
        if name == "oc.select":
            try:
                return self.lookup(str(arguments[0]), path, depth)
            except _Unknown:
                if len(arguments) > 1:
                    return arguments[1]
                raise
        if name == "eval" and re.fullmatch(r"[\d\s+\-*/().]{1,100}", rest):
            from ..syntax.shell_values import compute

            found = compute(rest.replace("//", "/"))
            if found is not None:
                return found
        if _ENV.match(name) and rest:
            return _typed(rest.removeprefix("-"))  # Primus: ${NAME:default}, and the shell's ${NAME:-default}
        raise _Unknown

    def lookup(self, name: str, path: Path, depth: int) -> Any:
        dots = len(name) - len(name.lstrip("."))
        keys = [k for k in re.split(r"[.\[\]]", name.lstrip(".")) if k]
        if not keys or depth > 20:
            raise _Unknown
        base = path[: len(path) - dots] if dots else ()
        for start in (keys, keys[1:]) if not dots and len(keys) > 1 and not self.has(keys[:1]) else (keys,):
            found = self.dig((*base, *start))
            if found is not _MISSING:
                if isinstance(found, str) and "${" in found:
                    return self.value(found, (*base, *start), depth + 1)
                if isinstance(found, (dict, list)):
                    raise _Unknown  # a whole table: kept as it is written
                if found == "???":
                    raise _Unknown
                return found
        raise _Unknown

    def has(self, keys: list[str]) -> bool:
        return self.dig(tuple(keys)) is not _MISSING

    def dig(self, path: Path) -> Any:
        here = self.root
        for key in path:
            if isinstance(here, Mapping) and key in here:
                here = here[key]
            elif isinstance(here, list) and str(key).isdigit() and int(key) < len(here):
                here = here[int(key)]
            else:
                return _MISSING
        return here


_MISSING = object()


def _spans(text: str) -> list[tuple[int, int]]:
    """Outermost ``${...}``."""
    found: list[tuple[int, int]] = []
    at = 0
    while (begin := text.find("${", at)) >= 0:
        depth, end = 0, begin
        while end < len(text):
            if text.startswith("${", end):
                depth, end = depth + 1, end + 2
                continue
            if text[end] == "}":
                depth -= 1
                if depth == 0:
                    break
            end += 1
        if depth:
            return found
        found.append((begin, end + 1))
        at = end + 1
    return found


def _split(text: str) -> list[str]:
    return [p.strip() for p in re.split(r",(?![^{\[]*[}\]])", text)] if text else []


def _typed(text: str) -> Any:
    bare = text.strip().strip("\"'")
    if re.fullmatch(r"[+-]?\d{1,18}", bare):
        return int(bare)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", bare):
        return float(bare)
    return {"true": True, "false": False, "null": None, "none": None}.get(bare.lower(), bare)
