"""Words of a shell script, character by character: quotes, expansions as they stand, blanks, and here-documents behind a line end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..document import Problem
from .shell_tree import Heredoc, Part, Word
from .source import Broken

META = " \t\n;&|()<>"


@dataclass
class Reader:
    """A place in a text. `line_of` maps an offset to the line in the file: the text may be a part of one, or a value put together from several places."""

    text: str
    line_of: Callable[[int], int]
    at: int = 0
    problems: list[Problem] = field(default_factory=list)
    pending: list[tuple[str, bool, bool, list[Heredoc]]] = field(default_factory=list)

    def line(self, at: int | None = None) -> int:
        return self.line_of(self.at if at is None else at)

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def blank(self) -> None:
        """Spaces, continuations and comments."""
        text = self.text
        while self.at < len(text):
            c = text[self.at]
            if c in " \t":
                self.at += 1
            elif c == "\\" and text.startswith("\\\n", self.at):
                self.at += 2
            elif c == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Behind a line end the bodies of here-documents begin."""
        self.at += 1
        for tag, dash, expands, holder in self.pending:
            begin, lines, line = self.at, [], self.line()
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (row.lstrip("\t") if dash else row) == tag:
                    break
                lines.append(row.lstrip("\t") if dash else row)
            else:
                self.problems.append(Problem("unclosed", f"the here-document never ends with {tag!r}", self.line_of(max(begin - 1, 0))))
            holder.append(Heredoc("".join(f"{row}\n" for row in lines), line, expands))
        self.pending.clear()

    def word(self) -> Word:
        """One word; adjacent pieces in different quotes belong together."""
        parts: list[Part] = []
        while self.at < len(self.text):
            c = self.peek()
            if c in META:
                break
            if c == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise Broken("a ' is never closed", self.line(), "unclosed")
                self.literal(parts, self.at + 1, end)
                self.at = end + 1
            elif c == '"':
                self.quoted(parts)
            elif c == "$" and self.peek(2) == "$'":
                ansi = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, self.at + 2)
                if not ansi:
                    raise Broken("a $' is never closed", self.line(), "unclosed")
                self.literal(parts, self.at + 2, ansi.end() - 1)
                self.at = ansi.end()
            elif c in "$`":
                self.dollar(parts, quoted=False)
            elif c == "\\":
                if self.peek(2) != "\\\n":
                    parts.append(Part("text", self.text[self.at + 1 : self.at + 2], self.line(), True))
                self.at += 2
            else:
                bare = re.compile(r"[^ \t\n;&|()<>'\"$`\\]+").match(self.text, self.at)
                assert bare is not None  # every other character has a branch above
                parts.append(Part("text", bare.group(), self.line()))
                self.at = bare.end()
        return tuple(parts)

    def literal(self, parts: list[Part], begin: int, end: int) -> None:
        """Quoted text, a part for each line."""
        if begin == end:
            parts.append(Part("text", "", self.line(begin), True))
        while begin < end:
            stop = self.text.find("\n", begin, end)
            stop = end if stop < 0 else stop + 1
            parts.append(Part("text", self.text[begin:stop], self.line(begin), True))
            begin = stop

    def quoted(self, parts: list[Part]) -> None:
        opened = self.line()
        self.at += 1
        parts.append(Part("text", "", opened, True))
        piece = re.compile(r'(?:[^"\\$`\n]|\\(?![\n"$`\\]))*\n?')
        while True:
            c = self.peek()
            if not c:
                raise Broken('a " is never closed', opened, "unclosed")
            if c == '"':
                self.at += 1
                return
            if c == "\\" and self.peek(2) == "\\\n":
                self.at += 2
            elif c == "\\" and self.text[self.at + 1 : self.at + 2] in '"$`\\':
                parts.append(Part("text", self.text[self.at + 1 : self.at + 2], self.line(), True))
                self.at += 2
            elif c in "$`":
                self.dollar(parts, quoted=True)
            else:
                found = piece.match(self.text, self.at)
                assert found is not None
                parts.append(Part("text", found.group(), self.line(), True))
                self.at = found.end()

    def dollar(self, parts: list[Part], quoted: bool) -> None:
        """``$name``, ``${...}``, ``$(...)``, ``$((...))``, backquotes; a lone ``$`` is text."""
        line = self.line()
        if self.peek() == "`":
            end = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
            if not end:
                raise Broken("a ` is never closed", line, "unclosed")
            self.at = end.end()
            parts.append(Part("cmd", end.group(1), line, quoted))
            return
        name = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])").match(self.text, self.at)
        if name:
            self.at = name.end()
            parts.append(Part("var", name.group(1), line, quoted))
        elif self.peek(3) == "$((":
            self.at += 1
            inner = self.nested("(", ")")
            both = inner.startswith("(") and inner.endswith(")")
            parts.append(Part("arith", inner[1:-1], line, quoted) if both else Part("cmd", inner, line, quoted))
        elif self.peek(2) == "$(":
            self.at += 1
            parts.append(Part("cmd", self.nested("(", ")"), line, quoted))
        elif self.peek(2) == "${":
            self.at += 1
            parts.append(Part("var", self.nested("{", "}"), line, quoted))
        else:
            parts.append(Part("text", "$", line, True))
            self.at += 1

    def nested(self, begin: str, end: str) -> str:
        """The text between a bracket and its partner; quotes are skipped. Stands behind the closing bracket afterwards."""
        start, depth, opened = self.at + 1, 0, self.line()
        skip = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.", re.DOTALL)
        while self.at < len(self.text):
            c = self.peek()
            if c in "'\"\\" and (found := skip.match(self.text, self.at)):
                self.at = found.end()
                continue
            depth += (c == begin) - (c == end)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise Broken(f"a {begin} is never closed", opened, "unclosed")
