"""A YAML writer for what is emitted here: mappings, lists and scalars, texts always in double quotes where a reader could take them otherwise.

Reading is PyYAML's, and only its safe loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError, one_line

_PLAIN = re.compile(r"^[A-Za-z_][A-Za-z0-9_./-]*$")
_TAKEN = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"}


def scalar(value: Any) -> str:
    """One value on one line, in a form that every YAML reader takes for the same thing."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))  # YAML 1.1 takes 1e-05 for a text, 1.0e-05 for a number
    text = str(value)
    if _PLAIN.match(text) and text.lower() not in _TAKEN:
        return text
    quoted = json.dumps(text, ensure_ascii=False)  # a JSON string is a YAML double-quoted scalar
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def dump(document: Any, indent: int = 0) -> str:
    """Block style, keys in the order given, two spaces."""
    pad = " " * indent
    lines = []
    if isinstance(document, Mapping):
        for key, value in document.items():
            lines.append(f"{pad}{scalar(str(key))}:{_below(value, indent + 2)}")
    else:
        for value in document:
            text = _below(value, indent + 2)
            lines.append(f"{pad}- {text.lstrip()}" if isinstance(value, Mapping) and value else f"{pad}-{text}")
    return "".join(lines)


def _below(value: Any, indent: int) -> str:
    if isinstance(value, Mapping):
        return "\n" + dump(value, indent) if value else " {}\n"
    if isinstance(value, (list, tuple)):
        return "\n" + dump(value, indent) if value else " []\n"
    if isinstance(value, str) and _fits_block(value):
        body = "".join(f"{' ' * indent}{line}\n" if line else "\n" for line in value.rstrip("\n").split("\n"))
        return (" |\n" if value.endswith("\n") else " |-\n") + body
    return f" {scalar(value)}\n"


def _fits_block(text: str) -> bool:
    """Several printable lines that a block scalar gives back as they were."""
    return (
        "\n" in text
        and not text.startswith((" ", "\n"))
        and not text.endswith("\n\n")
        and all(line.isprintable() for line in text.split("\n"))
    )


def load(text: str, where: str = "YAML") -> Any:
    """One document through PyYAML's safe loader: no tag of it runs code."""
    import yaml  # not at the top: writing needs none of it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(f"is no YAML: {one_line(error, 200)}", where) from None
