"""What a word of a script says, given what the script has set so far. Commands in it are never run: what they would print stays open."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from ..document import Problem
from .shell_parser import Parser
from .shell_tree import Part, Word
from .shell_values import LONGEST, Text, compute, joined, text
from .source import Broken

MOST_WORK = 1_000_000  # pieces of values: a script that asks for more is made to waste time, and stays open from there on
Value = Text | list[Text]
# Set by the system, the launcher or the scheduler: open, and no fault where a script does not set them.
OUTSIDE = re.compile(
    r"^(SLURM_|SLURMD_|PBS_|LSB_|OMPI_|PMI_|NVIDIA_|CUDA_|HF_|WANDB_|SM_|SKYPILOT_|K8S_|KUBERNETES_|RAY_|BASH|CONDA_|AZUREML_|DLWS_|MLP_|VC_|ARNOLD_)|"
    r"^(HOME|USER|LOGNAME|PWD|OLDPWD|HOSTNAME|PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|PYTHONPATH|TMPDIR|TMP|SHELL|RANK|WORLD_SIZE|LOCAL_RANK|NODE_RANK|"
    r"MASTER_ADDR|MASTER_PORT|NNODES|SCRATCH|WORK|LANG|DISPLAY|UID|EUID|PPID|RANDOM|SECONDS|LINENO|IFS|OPTARG|OPTIND|PIPESTATUS|EDITOR|TERM)$"
)
_PARAMETER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)


_QUOTED_DEFAULT = re.compile(r"""\w+:?[-=+](["'])[^"']*\1""")  # ${X:-"a b"} is one word


@dataclass
class State:
    """Variables at one moment of one way through the script."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[Text, ...] | None = None
    label: tuple[str, ...] = ()
    dead: bool = False

    def fork(self, label: str = "") -> State:
        more = (*self.label, label) if label else self.label
        return State(dict(self.variables), self.arguments, more, self.dead)

    def set(self, name: str, value: Value) -> None:
        self.variables[name] = value


@dataclass
class Expander:
    """Expands words; keeps note of the names that are used, and of those used before anything set them."""

    used: dict[str, int] = field(default_factory=dict)
    undefined: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    depth: int = 0
    work: int = 0  # pieces handled so far

    def fields(self, word: Word, state: State) -> list[Text]:
        """The word as the arguments that it becomes: quoted pieces stay whole, others split at blanks, ``"${A[@]}"`` gives one for each item."""
        done: list[Text] = []
        current, started = Text(), False
        for part in word:
            if part.kind == "text":
                current, started = current + text(part.value, part.line), True
                continue
            items = self.part(part, state)
            if part.quoted or _QUOTED_DEFAULT.fullmatch(part.value):
                for i, item in enumerate(items):
                    if i:
                        done.append(current)
                        current = Text()
                    current, started = current + item, True
                continue
            for item in items:
                words = item.split()
                raw = str(item)
                if not words:
                    continue
                if started and raw[:1] in " \t\n":
                    done.append(current)
                    current = Text()
                for i, piece in enumerate(words):
                    if i or (item is not items[0] and started):
                        done.append(current)
                        current = Text()
                    current, started = current + piece, True
                if raw[-1:] in (" ", "\t", "\n"):
                    done.append(current)
                    current, started = Text(), False
        return [*done, current] if started else done

    def string(self, word: Word, state: State) -> Text:
        """The word as one value, as an assignment takes it."""
        found = Text()
        for part in word:
            found = found + (text(part.value, part.line) if part.kind == "text" else joined(self.part(part, state)))
        return found

    def part(self, part: Part, state: State) -> list[Text]:
        found = self._part(part, state)
        self.work += 1 + sum(len(t.pieces) for t in found)
        return found if self.work < MOST_WORK else [text("$...", part.line, True)]

    def _part(self, part: Part, state: State) -> list[Text]:
        if part.kind == "arith":
            return [self.arithmetic(part.value, part.line, state)]
        if part.kind == "cmd":
            return self.command(part, state)
        return self.parameter(part, state)

    def arithmetic(self, source: str, line: int, state: State) -> Text:
        """``$((...))``: a number, or the expression with what is known filled in."""
        still_open = False

        def fill(hit: re.Match[str]) -> str:
            nonlocal still_open
            name = hit.group(1) or hit.group(2) or hit.group(3)
            found = self.lookup(name, line, state)
            value = (
                "" if found is None else str(found[0] if isinstance(found, list) and found else found if isinstance(found, Text) else "")
            )
            if found is None or (isinstance(found, Text) and found.open) or not value.strip():
                still_open = True
                return hit.group()
            if re.fullmatch(r"\d+(_\d+)+|\d+\.\d+|[\d.]+[eE][+-]?\d+", value.strip()):
                self.problems.append(
                    Problem("arithmetic", f"the shell cannot compute with {name}={value[:40]} ($((...)) takes whole numbers)", line)
                )
            return f"({value})" if re.search(r"[-+*/% ]", value.strip()) else value.strip()

        filled = re.sub(
            r"\$\{([A-Za-z_]\w*)(?:\[[^\]]*\])?(?::?-[^}]*)?\}|\$([A-Za-z_]\w*|\d)|(?<![\w$])([A-Za-z_]\w*)", fill, source[:400]
        )
        value = None if still_open else compute(filled)
        return text(f"$(({filled.strip()[:200]}))" if value is None else value, line, value is None)

    def command(self, part: Part, state: State) -> list[Text]:
        """``$(echo X)`` and the like are known without running anything; all else stays open."""
        source = part.value.strip()
        if not source or source.startswith("#"):
            return []
        found = re.match(r"(echo|printf|expr|basename|dirname)\s+(?:-[nes]+\s+|'%s'\s+|\"%s\"\s+)?([^|;&<>`]*)$", source)
        if found and self.depth < 8:
            self.depth += 1
            try:
                words = self.words(found.group(2), part.line, state)
            finally:
                self.depth -= 1
            if words and not any(w.open for w in words):
                return [self._known(found.group(1), words, part.line)]
        return [text(f"$({' '.join(source.split())[:60]})", part.line, True)]

    def _known(self, name: str, words: list[Text], line: int) -> Text:
        if name == "expr":
            value = compute(" ".join(str(w) for w in words))
            return text(f"$(expr {joined(words)})" if value is None else value, line, value is None)
        if name == "basename":
            base = str(words[0]).rstrip("/").rpartition("/")[2]
            return text(base.removesuffix(str(words[1])) if len(words) > 1 else base, line)
        if name == "dirname":
            return text(str(words[0]).rstrip("/").rpartition("/")[0] or ".", line)
        return joined(words)

    def words(self, source: str, line: int, state: State) -> list[Text]:
        parser = Parser(source, lambda _: line)
        found: list[Text] = []
        try:
            while True:
                parser.blank()
                before = parser.at
                word = parser.word()
                if parser.at == before:
                    return found
                found += self.fields(word, state)
        except Broken:
            return found

    def lookup(self, name: str, line: int, state: State) -> Value | None:
        """The value of a name; None where nothing set it."""
        if name.isdigit():
            index = int(name) - 1 if len(name) < 4 else 999
            if state.arguments is None or name == "0":
                return text(f"${name}", line, True)
            return state.arguments[index] if index < len(state.arguments) else Text()
        if name in "@*":
            return list(state.arguments) if state.arguments is not None else text(f"${name}", line, True)
        if name == "#":
            return text(len(state.arguments), line) if state.arguments is not None else text("$#", line, True)
        if not name[0].isalpha() and name[0] != "_":
            return text(f"${name}", line, True)
        self.used.setdefault(name, line)
        if name in state.variables:
            return state.variables[name]
        if not OUTSIDE.match(name):
            self.undefined.setdefault(name, line)
        return None

    def parameter(self, part: Part, state: State) -> list[Text]:
        """``$X``, ``${X}`` and its forms; ``${A[@]}`` gives several."""
        source, line = part.value, part.line
        length = source.startswith("#") and len(source) > 1
        indirect = source.startswith("!") and len(source) > 1
        hit = _PARAMETER.match(source[1:] if length or indirect else source)
        if not hit or indirect or self.depth > 20:
            return [text(f"${{{source[:60]}}}", line, True)]
        name, index, rest = hit.group(1), (hit.group(2) or "")[1:-1], hit.group(3)
        index = index or ("@" if name in ("@", "*") else "")
        known_before = name in self.undefined
        value = self.lookup(name, line, state)
        if (rest[:1] in (":", "-", "=", "+", "?") and rest and rest[:2] in (":-", ":=", ":+", ":?", "-", "=", "+", "?")) or re.match(
            r"[-=+?]", rest
        ):
            if not known_before:
                self.undefined.pop(name, None)
            return self.default(name, value, rest, line, state)
        items = self.indexed(value, index, part.quoted, line, state)
        if items is None:
            return [text(f"${{{source[:60]}}}" if rest or index else f"${name}", line, True)]
        if length:
            known = isinstance(value, list) and index in "@*"
            return [text(len(items) if known else len(str(joined(items))), line, any(i.open for i in items))]
        return [self.shaped(item, rest, line) for item in items] if rest else items

    def indexed(self, value: Value | None, index: str, quoted: bool, line: int, state: State) -> list[Text] | None:
        if value is None:
            return None
        if isinstance(value, Text):
            return [value] if index in ("", "@", "*", "0") else None
        if index in ("@", "*") or not index:
            return list(value) if index else (list(value[:1]) if value else [])
        at = self.arithmetic(index, line, state)
        number = int(str(at)) if re.fullmatch(r"-?\d{1,6}", str(at)) else None
        return [value[number]] if number is not None and -len(value) <= number < len(value) else None

    def default(self, name: str, value: Value | None, rest: str, line: int, state: State) -> list[Text]:
        """``${X:-d}``, ``${X:=d}``, ``${X:+d}``, ``${X:?m}``."""
        operator = rest.lstrip(":")[:1]
        source = rest.lstrip(":")[1:] if rest.startswith(":") else rest[1:]
        empty = value is None or (isinstance(value, Text) and not str(value)) or (isinstance(value, list) and not value)
        if isinstance(value, Text) and value.open and re.fullmatch(r"\$\d+", str(value)) and operator in "-=":
            empty = True  # an argument that nobody gave
        self.depth += 1
        try:
            if operator in "-=":
                if not empty and value is not None:
                    return [value] if isinstance(value, Text) else value
                found = self.string(self.quoted_word(source, line), state)
                if operator == "=":
                    state.set(name, found)
                return [found]
            if operator == "+":
                return [] if empty else [self.string(self.quoted_word(source, line), state)]
            return [text(f"${name}", line, True)] if empty or value is None else [value] if isinstance(value, Text) else value
        finally:
            self.depth -= 1

    def quoted_word(self, source: str, line: int) -> Word:
        """The text behind ``:-``, which may hold quotes and expansions."""
        bare = source.strip()
        if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'" and bare[0] not in bare[1:-1]:
            if bare[0] == "'":
                return (Part("text", bare[1:-1], line, True),)
            source = bare[1:-1]
        parts: list[Part] = []
        parser = Parser('"' + source.replace('"', '\\"') + '"', lambda _: line)
        try:
            parser.quoted(parts)
        except Broken:
            return (Part("text", source, line, True),)
        return tuple(parts)

    def quoted_row(self, row: str, line: int) -> Word:
        """A line of a here-document: expanded as in double quotes, in which quotes mean nothing."""
        parts: list[Part] = []
        parser = Parser(row, lambda _: line)
        while parser.at < len(row):
            c = row[parser.at]
            if c == "\\" and row[parser.at + 1 : parser.at + 2] in ("$", "`", "\\"):
                parts.append(Part("text", row[parser.at + 1], line, True))
                parser.at += 2
            elif c in "$`":
                try:
                    parser.dollar(parts, quoted=True)
                except Broken:
                    parts.append(Part("text", row[parser.at :], line, True))
                    break
            else:
                end = re.compile(r"[^\\$`]+|\\").match(row, parser.at)
                assert end is not None
                parts.append(Part("text", end.group(), line, True))
                parser.at = end.end()
        return tuple(parts)

    def shaped(self, value: Text, rest: str, line: int) -> Text:
        """Removal, replacement and substrings of a known value; of an open one the form stays open."""
        plain = str(value)
        if value.open or len(plain) > LONGEST // 10:
            return text(f"{plain}{rest[:20]}", line, True)
        for operator, cut in (("##", _front), ("#", _front), ("%%", _back), ("%", _back)):
            if rest.startswith(operator):
                return text(cut(plain, rest[len(operator) :], greedy=len(operator) == 2), line)
        if rest.startswith("/"):
            everywhere = rest.startswith("//")
            pattern, _, new = rest.lstrip("/").partition("/")
            return text(plain.replace(pattern, new) if everywhere else plain.replace(pattern, new, 1), line)
        part = re.fullmatch(r":\s*(-?\d{1,6})(?::(\d{1,6}))?", rest)
        if part:
            start = int(part.group(1))
            return text(plain[start:][: int(part.group(2))] if part.group(2) else plain[start:], line)
        cases = {"^^": plain.upper(), ",,": plain.lower(), "^": plain[:1].upper() + plain[1:], ",": plain[:1].lower() + plain[1:]}
        return text(cases[rest], line) if rest in cases else text(f"{plain}{rest[:20]}", line, True)


def _front(value: str, pattern: str, greedy: bool) -> str:
    ends = range(len(value), -1, -1) if greedy else range(len(value) + 1)
    return next((value[e:] for e in ends if fnmatch.fnmatchcase(value[:e], pattern)), value) if len(value) < 2000 else value


def _back(value: str, pattern: str, greedy: bool) -> str:
    starts = range(len(value) + 1) if greedy else range(len(value), -1, -1)
    return next((value[:s] for s in starts if fnmatch.fnmatchcase(value[s:], pattern)), value) if len(value) < 2000 else value
