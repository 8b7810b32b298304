"""Mends a shell script: the words of one flag are edited where they stand in the text; comments, continuation lines and quotes around them stay.

An edit counts only if the script, read again, starts the same commands with the same words but for the one that was wanted. A value that comes from a
variable is edited where the variable is set if nothing else uses it; otherwise the reason says what to change where.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import syntax
from .document import Document
from .findings import Change, Finding
from .syntax.shell_run import Script
from .syntax.shell_words import Token, tokens_of

Edits = Callable[[Document, Change], Iterable[str]]  # texts that may be the file with the change in it
DEFAULT = re.compile(r"""^"?\$\{(?P<name>[A-Za-z_]\w*):?[-=](?P<value>[\w.,:/+-]*)\}"?$""")  # ${LR:-1e-4}
VARIABLE = re.compile(r"""^["']?\$\{?([A-Za-z_]\w*)\}?["']?$""")


class Refused(Exception):
    """Why a change is not made, in words for the user."""


def apply(name: str, text: str, change: Change, finding: Finding, edits: Edits) -> str:
    """The script with one change; `edits` are those of the files that it writes. Raises `Refused` with what the user has to change, and where."""
    before = syntax.read(name, text)
    part = _part(before, change, finding)
    if change.value is False and _value_of(part.data, change) is True:
        change = replace(change, value=None, remove=True)  # a bare switch is off where it is not
    candidates = _embedded(name, text, part, change, edits) if part.syntax in ("json", "yaml") else _command(text, before, part, change)
    for candidate in candidates:
        if candidate != text and _only(before, syntax.read(name, candidate), part, change):
            return candidate
    raise Refused(f"write it yourself: {_wanted(change)}")


def _wanted(change: Change) -> str:
    flag = _flag(change)
    if change.remove:
        return f"remove {flag}"
    return f"call {flag} --{change.rename}" if change.rename is not None else f"set {flag} to {change.value}"


def _flag(change: Change) -> str:
    return "--" + ".".join(str(p) for p in change.path if p != "sbatch")


def _part(documents: Sequence[Document], change: Change, finding: Finding) -> Document:
    """The command, header or here-document that the change is about: it has the key, on the finding's line where several have it."""
    holding = [d for d in documents if _has(d.data, change.path)]
    here = [d for d in holding if d.lines.get(change.path) == finding.place.line]
    if here or holding:
        return (here or holding)[0]
    if change.remove or change.rename is not None:
        raise Refused(f"{_flag(change)} stands nowhere in the script")
    near = [d for d in documents if d.parent and finding.place.path and d.lines.get(finding.place.path) == finding.place.line]
    programs = [d for d in documents if getattr(d.detail, "kind", "") == "program"]
    if not near and len(programs) != 1:
        raise Refused(f"add {_flag(change)} {change.value} to the command that it is meant for")
    return (near or programs)[0]


def _has(data: Any, path: Sequence[str | int]) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return bool(path)


def _only(before: Sequence[Document], after: Sequence[Document], part: Document, change: Change) -> bool:
    """Whether the change, and nothing else, is what became of the script; commands that share the edited words share the change."""
    if any(p.fatal or p.kind in ("broken", "unclosed", "lost-arguments") for d in after for p in _new(d, before)):
        return False
    if change.remove and set(part.data) == {change.path[0]} and len(after) < len(before):
        return [d.data for d in after] == [d.data for d in before if d is not part]  # a command without options is none that trains
    if len(before) != len(after):
        return False
    value = change.value
    if part.syntax not in ("json", "yaml") and (value is not True or _has(part.data, change.path)):
        value = _as_read(value, _value_of(part.data, change))  # a new switch stands for itself
    told = replace(change, value=value)
    wanted = told.applied(part.data)
    line = part.lines.get(change.path)
    mended = 0
    for old, new in zip(before, after, strict=True):
        same_words = old.lines.get(change.path) == line and _value_of(old.data, change) == _value_of(part.data, change)
        if old.data == part.data and same_words and new.data == wanted:
            mended += 1
        elif old.data != new.data and not (same_words and line is not None and new.data == told.applied(old.data)):
            return False
    return mended > 0


def _new(document: Document, before: Sequence[Document]) -> Iterator[Any]:
    known = {(p.kind, p.message) for d in before for p in d.problems}
    return (p for p in document.problems if (p.kind, p.message) not in known)


def _value_of(data: Any, change: Change) -> Any:
    for key in change.path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _as_read(value: Any, before: Any) -> Any:
    """The value as a reader of the script gets it: a word, in the manner of the one that stood there."""
    if isinstance(value, bool):
        word = "true" if value else "false"
        return word.capitalize() if not isinstance(before, str) or before[:1].isupper() else word
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else str(value)


def _words(value: Any, before: Any) -> str:
    found = _as_read(value, before)
    return " ".join(shlex.quote(w) for w in ([found] if isinstance(found, str) else found))


def _command(text: str, documents: Sequence[Document], part: Document, change: Change) -> Iterator[str]:
    """Edits of a command line or of a scheduler's header."""
    if change.path[:1] == ("sbatch",):
        yield from _header(text, part, change)
        return
    groups, ends = tokens_of(text)
    line = part.lines.get(change.path)
    if line is None:
        yield from _insert(text, groups[0], ends, part, change)
        return
    name = ".".join(map(str, change.path))
    flag = re.compile(rf"""^["']?(?P<dashes>-{{0,2}}[+~]{{0,2}}){re.escape(name)}(?P<equals>=|$|["']$)""")
    hits = [
        (tokens, i, hit)
        for tokens in groups
        for i, t in enumerate(tokens)
        if t.line == line and (hit := flag.match(t.raw)) and (hit["dashes"] or hit["equals"] == "=")
    ]
    for tokens, index, hit in hits:
        token, begin = tokens[index], tokens[index].start
        count = 0 if hit["equals"] == "=" else _count(_value_of(part.data, change))
        values = tokens[index + 1 : index + 1 + count]
        if change.rename is not None:
            yield text[: begin + hit.end("dashes")] + change.rename + text[begin + hit.end("dashes") + len(name) :]
        elif change.remove:
            yield from _without(text, begin, (values or [token])[-1].end)
        elif hit["equals"] == "=":
            yield from _set(text, documents, Token(begin + hit.end(), token.end, token.line, token.raw[hit.end() :]), part, change)
        elif len(values) == 1:
            yield from _set(text, documents, values[0], part, change)
    if not hits:
        raise Refused(f"{_flag(change)} comes out of an expansion on line {line}: {_wanted(change)} there")


def _count(value: Any) -> int:
    return 0 if value is True else len(value) if isinstance(value, list) else 1


def _set(text: str, documents: Sequence[Document], token: Token, part: Document, change: Change) -> Iterator[str]:
    """Another value in the place of a literal one, or in the assignment of the one variable that holds it."""
    written = _words(change.value, _value_of(part.data, change))
    quote = token.raw[0] if token.raw[:1] in "\"'" and token.raw[-1:] == token.raw[:1] else ""
    if "$" not in token.raw and "`" not in token.raw:
        inner = written if not quote or written != shlex.quote(written) else quote + written + quote
        yield text[: token.start] + inner + text[token.end :]
        return
    script = next((d.detail for d in documents if isinstance(d.detail, Script)), None)
    own = DEFAULT.match(token.raw)
    if own and script and own["name"] not in script.assigned and re.fullmatch(r"[\w.,:/+-]+", written):
        yield text[: token.start + own.start("value")] + written + text[token.start + own.end("value") :]
        return
    variable = VARIABLE.match(token.raw)
    if variable is None:
        raise Refused(f"its value is made by {token.raw[:60]} on line {token.line}: {_wanted(change)} by changing what that is made of")
    name = variable.group(1)
    at = script.assigned.get(name) if script else None
    if at is None:
        raise Refused(f"its value is ${name}, which comes from the environment: {_wanted(change)} there, or on line {token.line}")
    uses = {text.count("\n", 0, m.start()) + 1 for m in re.finditer(rf"(?<![\w-]){name}\b(?!\+?=)", text)} - {token.line}
    value = r"\$\(\(.*?\)\)|\$\(.*?\)|\"[^\"\n]*\"|'[^'\n]*'|[^\s;#&|]*"
    sets = list(re.finditer(rf"(?m)(?:^[ \t]*(?:export[ \t]+)?|(?<=[\s;])){name}\+?=(?P<value>{value})(?=[\s;#&|]|$)", text))
    default = DEFAULT.match(sets[0]["value"]) if len(sets) == 1 else None
    if default and default["name"] == name:  # NAME=${NAME:-...} uses itself
        uses -= {at}
    if uses or len(sets) != 1:
        lines = f"line{'s' if len(uses) > 1 else ''} {', '.join(map(str, sorted(uses)))}"
        elsewhere = f"is used on {lines} too" if uses else "is set more than once"
        raise Refused(f"its value is ${name} (line {at}), which {elsewhere}: change it there, or write {change.value} on line {token.line}")
    if default and script and re.fullmatch(r"[\w.,:/+-]+", written) and (default["name"] == name or default["name"] not in script.assigned):
        first = sets[0].start("value")
        yield text[: first + default.start("value")] + written + text[first + default.end("value") :]
        return
    if "$" in sets[0]["value"] or "`" in sets[0]["value"]:
        raise Refused(f"its value is ${name}, made by {sets[0]['value'][:60]} on line {at}: {_wanted(change)} there")
    yield text[: sets[0].start("value")] + written + text[sets[0].end("value") :]


def _without(text: str, begin: int, end: int) -> Iterator[str]:
    """The words gone: with their line where they have it for themselves, with the backslash before where they ended the command."""
    first = text.rfind("\n", 0, begin) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    rest = text[end:stop].strip()
    if not text[first:begin].strip() and rest in ("", "\\"):
        if rest == "":
            before = re.compile(r"[ \t]*\\\n\Z").search(text[:first])
            if before:
                yield text[: before.start()] + text[stop:]
        yield text[:first] + text[stop + 1 :]
    gap = len(text[:begin]) - len(text[:begin].rstrip(" \t"))
    yield text[: begin - gap] + text[end:]
    yield text[:begin] + text[end:].lstrip(" \t")


def _header(text: str, part: Document, change: Change) -> Iterator[str]:
    """One ``#SBATCH`` line."""
    lines = text.splitlines(keepends=True)
    line = part.lines.get(change.path)
    if line is None:
        last = max((n for p, n in part.lines.items() if p[:1] == ("sbatch",)), default=0)
        if last and change.value is not None:
            yield "".join([*lines[:last], f"#SBATCH --{change.path[-1]}={_words(change.value, None)}\n", *lines[last:]])
        return
    index, key = line - 1, re.escape(str(change.path[-1]))
    short = next((s for s, long in syntax.shell.SHORT.items() if long == change.path[-1]), None)
    hit = re.search(rf"(?P<flag>--{key}(?P<sep>[= \t]+)|-{short or '(?!)'}(?P<gap>[= \t]*))(?P<value>\S+)", lines[index])
    if hit is None:
        return
    if change.remove:
        yield "".join(lines[:index] + lines[index + 1 :])
    elif change.rename is None:
        row = lines[index]
        yield "".join(
            [*lines[:index], row[: hit.start("value")] + _words(change.value, None) + row[hit.end("value") :], *lines[index + 1 :]]
        )


def _insert(text: str, tokens: Sequence[Token], ends: Sequence[tuple[int, int]], part: Document, change: Change) -> Iterator[str]:
    """A new flag behind the command's last word, on a line of its own where the command has several; a launcher's behind the launcher."""
    layer = part.detail
    written = f"{_flag(change)} {_words(change.value, None)}" if change.value is not True else _flag(change)
    named = [t for t in tokens if t.line == layer.line and t.plain == str(layer.name)]
    if not named:
        raise Refused(f"add {written} to the command on line {layer.line}")
    if layer.kind != "program":
        yield text[: named[0].end] + f" {written}" + text[named[0].end :]
        return
    begin, end = next((c for c in ends if c[0] <= named[0].start < c[1]), (0, named[0].end))
    first = text.rfind("\n", 0, end) + 1
    indent = re.match(r"[ \t]*", text[first:])
    if first > begin and indent is not None:
        yield text[:end] + f" \\\n{indent.group()}{written}" + text[end:]
    yield text[:end] + f" {written}" + text[end:]


def _embedded(name: str, text: str, part: Document, change: Change, edits: Edits) -> Iterator[str]:
    """A file that the script writes from a here-document: edited as that file where the script puts its text there as it is."""
    script = next((d.detail for d in syntax.read(name, text) if isinstance(d.detail, Script)), None)
    rows = text.splitlines(keepends=True)
    for written in script.written if script else ():
        body = str(written.text)
        first, count = written.line - 1, body.count("\n")
        if written.target.rpartition("/")[2] not in (part.part, "") or "".join(rows[first : first + count]) != body:
            continue
        lines = {p: n - first for p, n in part.lines.items()}
        for candidate in edits(Document(name, body, part.syntax, part.data, lines), change):
            yield "".join([*rows[:first], candidate, *rows[first + count :]])
    raise Refused(f"the script writes {part.part or 'it'} with expansions in it: {_wanted(change)} in the script")
