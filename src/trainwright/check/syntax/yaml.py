"""YAML with the line of each key, built from PyYAML's event stream: no constructor ever sees a tag, aliases are counted, depth is bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from ...errors import one_line
from ..document import Document, Path, Problem
from .source import DEEPEST, Broken

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = yaml.resolver.Resolver()
_SCALARS = yaml.constructor.SafeConstructor()
MOST_NODES = 60_000  # values of one document, aliases unfolded
_CORE = "tag:yaml.org,2002:"
_MERGE = _CORE + "merge"
_BOOLEANS = _SCALARS.bool_values


def read(name: str, text: str, first_line: int = 1, **part: Any) -> list[Document]:
    """Every document of the stream; `Broken` where PyYAML refuses it."""
    found: list[Document] = []
    try:
        for builder, data in _documents(text, first_line):
            label = {**part, "part": f"document {len(found) + 1}"} if found else part
            found.append(Document(name, text, "yaml", data, builder.lines, tuple(builder.problems), **label))
    except yaml.YAMLError as error:
        raise _broken(error, first_line) from None
    except (RecursionError, ValueError, UnicodeError) as error:
        raise Broken(one_line(error, 200)) from None
    return found


def _broken(error: Exception, first_line: int) -> Broken:
    mark = getattr(error, "problem_mark", None)
    what = one_line(getattr(error, "problem", None) or error, 160)
    context = getattr(error, "context", None)
    return Broken(f"{what}" + (f" ({one_line(context, 80)})" if context else ""), mark.line + first_line if mark else None)


def _documents(text: str, first_line: int) -> Iterator[tuple[_Builder, Any]]:
    events = yaml.parse(text, Loader=_LOADER)
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            builder = _Builder(events, first_line)
            tree = builder.node(next(events), 0)
            yield builder, builder.unfold(tree, (), 0)


class _Node:
    """A node of the tree before aliases are unfolded: `value` is a scalar, a list of nodes or a list of (key, node)."""

    __slots__ = ("kind", "line", "tag", "value")

    def __init__(self, kind: str, value: Any, line: int, tag: str | None) -> None:
        self.kind, self.value, self.line, self.tag = kind, value, line, tag


class _Builder:
    def __init__(self, events: Iterator[Any], first_line: int) -> None:
        self.events, self.first = events, first_line
        self.anchors: dict[str, _Node] = {}
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.made = self.count = 0

    def node(self, event: Any, depth: int) -> _Node:
        line = event.start_mark.line + self.first
        if depth > DEEPEST:
            raise Broken(f"is nested more than {DEEPEST} deep", line)
        self.made += 1
        if self.made > MOST_NODES:
            raise Broken(f"holds more than {MOST_NODES:,} values", line, "too-large")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise Broken(f"*{event.anchor} names no anchor", line)
            return self.anchors[event.anchor]
        made = _Node("scalar", None, line, event.tag)
        if event.anchor:
            self.anchors[event.anchor] = made
        if isinstance(event, yaml.ScalarEvent):
            made.value = self.scalar(event, line)
            if event.value == "<<" and event.implicit[0]:  # not where it is quoted
                made.tag = _MERGE
        elif isinstance(event, yaml.SequenceStartEvent):
            made.kind, made.value = "list", []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                made.value.append(self.node(event, depth + 1))
        else:
            made.kind, made.value = "map", []
            while not isinstance(event := next(self.events), yaml.MappingEndEvent):
                key = self.node(event, depth + 1)
                key_line = event.start_mark.line + self.first
                made.value.append((key, key_line, self.node(next(self.events), depth + 1)))
        return made

    def scalar(self, event: Any, line: int) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            if not event.implicit[0]:
                return event.value
            tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
        elif not tag.startswith(_CORE) or tag.startswith(_CORE + "python"):
            return event.value
        return _value(tag.removeprefix(_CORE), event.value)

    def unfold(self, node: _Node, path: Path, depth: int) -> Any:
        """Plain data; a shared node is built again at every place where it stands."""
        self.count += 1
        if self.count > MOST_NODES or depth > DEEPEST:
            raise Broken("aliases unfold to more than a configuration can hold", node.line, "anchors")
        if node.tag and node.tag != "!" and (not node.tag.startswith(_CORE) or "python" in node.tag):
            self.problems.append(
                Problem("tag", f"the tag {node.tag[:60]} is kept as data; nothing is included or run", node.line, path=path)
            )
        if node.kind == "list":
            found = []
            for i, item in enumerate(node.value):
                self.lines[(*path, i)] = item.line
                found.append(self.unfold(item, (*path, i), depth + 1))
            return found
        if node.kind == "map":
            return self.mapping(node, path, depth)
        return node.value

    def mapping(self, node: _Node, path: Path, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        merged: list[_Node] = []
        own: set[Any] = set()
        for key_node, line, value in node.value:
            key = key_node.value if key_node.kind == "scalar" else repr(self.unfold(key_node, path, depth + 1))
            key = str(key) if isinstance(key, (float, type(None))) else key
            if key_node.tag == _MERGE:
                merged += value.value if value.kind == "list" else [value]
                continue
            here = (*path, key if isinstance(key, (str, int)) and not isinstance(key, bool) else str(key))
            if key in own:
                before = self.lines.get(here)
                self.problems.append(
                    Problem("duplicate-key", f"{key!r} stands twice (first on line {before}); the last wins", line, path=here)
                )
            own.add(key)
            self.lines[here] = line
            found[here[-1]] = self.unfold(value, here, depth + 1)
        for source in reversed(merged):
            if source.kind == "map":
                kept = dict(self.lines)
                more = self.mapping(source, path, depth + 1)
                self.lines |= kept
                found = {**more, **found}
        return found


def _value(tag: str, text: str) -> Any:
    """A scalar of YAML 1.1's own types; dates and binary stay text."""
    plain = text.replace("_", "")
    if tag == "null":
        return None
    if tag == "bool":
        return _BOOLEANS.get(text.lower(), text)
    if tag == "int" and len(plain) < 400 and re.fullmatch(r"[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0[0-7]*|[1-9]\d*)", plain):
        sign = -1 if plain.startswith("-") else 1
        bare = plain.lstrip("+-")
        base = 2 if bare.startswith("0b") else 16 if bare.startswith("0x") else 8 if bare.startswith("0") and len(bare) > 1 else 10
        return sign * int(bare, base)
    if tag == "float":
        special = {".inf": "inf", "-.inf": "-inf", "+.inf": "inf", ".nan": "nan"}.get(plain.lower(), plain)
        try:
            return float(special)
        except ValueError:
            return text
    return text
