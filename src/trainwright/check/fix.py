"""Mends a file where it stands: the text is edited at the keys that findings name; comments, order and layout stay.

Every edit is read back: one whose result does not say exactly what was wanted is not made, and the report says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import fix_shell
from .document import Document, Path
from .findings import Change, Finding
from .spans import Span, json_spans

Read = Callable[[str, str], Document]  # (name, text) -> document


@dataclass(frozen=True)
class Mended:
    """`text` with the changes of `applied` in it; `left` are findings whose changes this file did not allow, `reasons` why, one of each."""

    name: str
    text: str
    applied: tuple[Finding, ...]
    left: tuple[Finding, ...]
    reasons: tuple[str, ...] = ()


def mend(document: Document, findings: Iterable[Finding], read: Read) -> Mended:
    """The file with every change that findings propose for it. Changes that touch the same key are made once."""
    text = document.text
    applied: list[Finding] = []
    left: list[Finding] = []
    done: set[tuple[Any, ...]] = set()
    reasons: list[str] = []
    for finding in findings:
        own = [c for c in finding.changes if c.file == document.name]
        if not own:
            continue
        mended = text
        made: set[tuple[Any, ...]] = set()
        try:
            for change in own:
                line = finding.place.line if document.syntax == "shell" else None  # each command of a script has flags of its own
                key = (change.path, change.rename, change.remove, repr(change.value), line)
                if key not in done:
                    mended = _apply(document, mended, change, finding, read)
                    made.add(key)
        except fix_shell.Refused as error:
            left.append(finding)
            reasons.append(str(error))
        else:
            text, done = mended, done | made
            applied.append(finding)
    return Mended(document.name, text, tuple(applied), tuple(left), tuple(reasons))


def _apply(document: Document, text: str, change: Change, finding: Finding, read: Read) -> str:
    """The text with one change. Raises `Refused` where that cannot be done or does not read back as wanted."""
    now = read(document.name, text)
    if now.syntax == "shell":
        return fix_shell.apply(document.name, text, change, finding, edits)
    wanted = change.applied(now.data)
    if wanted is None:
        raise fix_shell.Refused("its change has no place in the file")
    if wanted == now.data:
        return text
    for candidate in edits(now, change):
        try:
            after = read(document.name, candidate)
        except Exception:
            continue
        if after.data == wanted and not any(p.fatal for p in after.problems):
            return candidate
    raise fix_shell.Refused("its change does not fit into the file's layout")


def edits(document: Document, change: Change) -> Iterable[str]:
    """Texts that may be the file with the change in it; each has to be read back."""
    kinds: Mapping[str, Callable[[Document, Change], Iterable[str]]] = {"json": _json, "yaml": _lines, "toml": _lines}
    return kinds[document.syntax](document, change) if document.syntax in kinds else ()


def _json(document: Document, change: Change) -> Iterable[str]:
    """Edits of a JSON text at the offsets of its keys."""
    text, spans = document.text, json_spans(document.text)
    here = spans.get(change.path)
    if here is None:
        if not change.remove and change.rename is None:
            yield from _insert_json(text, spans, change)
        return
    if change.remove:
        yield from _without(text, here)
    elif change.rename is not None:
        end = text.index('"', here.key + 1)
        yield text[: here.key] + json.dumps(change.rename) + text[end + 1 :]
    else:
        yield text[: here.start] + json.dumps(change.value) + text[here.end :]


def _without(text: str, here: Span) -> Iterable[str]:
    """A member removed with one of the commas beside it, and with its line where it has one of its own."""
    after = re.compile(r"\s*,[ \t]*(?:\n(?=[^\n]))?").match(text, here.end)
    line = text.rfind("\n", 0, here.key) + 1
    begin = line if not text[line : here.key].strip() else here.key
    if after:
        yield text[:begin] + text[after.end() :]
    before = re.compile(r",\s*\Z").search(text[: here.key])
    if before:
        yield text[: before.start()] + text[here.end :]
    yield text[: here.key] + text[here.end :].lstrip()


def _insert_json(text: str, spans: Mapping[Path, Span], change: Change) -> Iterable[str]:
    """A new member behind the last one of its object, indented as that is."""
    parent, name = change.path[:-1], change.path[-1]
    member = f"{json.dumps(name)}: {json.dumps(change.value)}"
    siblings = [s for p, s in spans.items() if p[:-1] == parent and len(p) == len(parent) + 1]
    if siblings:
        last = max(siblings, key=lambda s: s.end)
        line = text.rfind("\n", 0, last.key) + 1
        own_line = not text[line : last.key].strip() and line > 0
        yield text[: last.end] + "," + (f"\n{text[line : last.key]}" if own_line else " ") + member + text[last.end :]
    elif parent in spans and text[spans[parent].start] == "{":
        yield text[: spans[parent].start] + "{" + member + "}" + text[spans[parent].end :]
    elif parent and parent[:-1] in {p[:-1] for p in spans}:
        yield from _insert_json(text, spans, Change(change.file, parent, {name: change.value}))


def _lines(document: Document, change: Change) -> Iterable[str]:
    """Edits of YAML or TOML: the key is looked for on its own line, then in the rest of its block."""
    lines = document.text.splitlines(keepends=True)
    number = document.lines.get(change.path)
    if number is None:
        if not change.remove and change.rename is None:
            yield from _insert_line(document, lines, change)
        return
    index = number - 1
    if not 0 <= index < len(lines):
        return
    key = re.compile(r"""(?P<before>^|[\s{,\[-])(?P<key>["']?""" + re.escape(str(change.path[-1])) + r"""["']?)(?P<sep>\s*[:=]\s*)""")
    for hit in key.finditer(lines[index]):
        begin, end = hit.start("key"), hit.end("key")
        line = lines[index]
        if change.rename is not None:
            quote = line[begin] if line[begin] in "\"'" else ""
            yield _joined(lines, index, line[:begin] + quote + change.rename + quote + line[end:])
        elif change.remove:
            yield "".join(lines[:index] + lines[_block_end(lines, index) :])
            yield _joined(lines, index, re.sub(r"^\s*,\s*", "", line[:begin] + re.sub(r"^[^,}\]\n]*,?\s*", "", line[hit.end() :], count=1)))
        else:
            written = _literal(document.syntax, change.value)
            value = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#,}\]]+(?:[ \t]+[^\s#,}\]]+)*|)""").match(line, hit.end("sep"))
            assert value is not None
            gap = "" if hit.group("sep")[-1:].isspace() and "\n" not in hit.group("sep") else " "
            stop = hit.end("sep") if "\n" not in hit.group("sep") else hit.start("sep") + len(hit.group("sep").split("\n")[0])
            end = value.end() if "\n" not in hit.group("sep") else stop
            yield _joined(lines, index, line[:stop] + gap + written + line[end:])


def _joined(lines: list[str], index: int, line: str) -> str:
    return "".join([*lines[:index], line, *lines[index + 1 :]])


def _block_end(lines: list[str], index: int) -> int:
    """The line behind the block of the key on line `index`: the next that is not blank and no deeper."""
    depth = len(lines[index]) - len(lines[index].lstrip())
    end = index + 1
    while end < len(lines):
        line = lines[end]
        bare = line.strip()
        if bare and (
            len(line) - len(line.lstrip()) < depth or (len(line) - len(line.lstrip()) == depth and not bare.startswith(("- ", "]", "}")))
        ):
            break
        end += 1
    while end > index + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _insert_line(document: Document, lines: list[str], change: Change) -> Iterable[str]:
    """A new key under its parent, before the parent's first child and indented as that is; at the top level, at the end."""
    parent = change.path[:-1]
    sep = ": " if document.syntax == "yaml" else " = "
    written = f"{change.path[-1]}{sep}{_literal(document.syntax, change.value)}"
    children = sorted((n, p) for p, n in document.lines.items() if len(p) == len(parent) + 1 and p[: len(parent)] == parent)
    if children:
        first = children[0][0] - 1
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        yield "".join([*lines[:first], f"{indent}{written}\n", *lines[first:]])
    elif not parent:
        yield "".join([*lines, "" if not lines or lines[-1].endswith("\n") else "\n", f"{written}\n"])


def _literal(syntax: str, value: Any) -> str:
    """A value as YAML or TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null" if syntax == "yaml" else '""'
    if isinstance(value, str) and syntax == "yaml" and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return value if value.lower() not in ("yes", "no", "on", "off", "true", "false", "null", "y", "n") else json.dumps(value)
    return json.dumps(value)
