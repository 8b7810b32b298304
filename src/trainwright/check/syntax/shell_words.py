"""Where each word of a shell script stands in its text: for edits, and for checks that ask how a value is written rather than what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .shell_parser import Parser
from .shell_tree import Heredoc, Node, Word
from .source import Lines


@dataclass(frozen=True)
class Token:
    """A word of the text: its offsets, and the line it begins on."""

    start: int
    end: int
    line: int
    raw: str

    @property
    def plain(self) -> str:
        return self.raw.strip("\"'")


@dataclass
class _Spans(Parser):
    """The parser of scripts, which also notes where each word and the end of each command stand."""

    tokens: list[Token] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)  # first and last offset of a command's words

    def word(self) -> Word:
        start, found = self.at, super().word()
        if self.at > start:
            self.tokens.append(Token(start, self.at, self.line(start), self.text[start : self.at]))
        return found

    def redirect(self, heredocs: list[Heredoc]) -> Word | None:
        before, found = len(self.tokens), super().redirect(heredocs)
        del self.tokens[before:]
        return found

    def simple(self) -> Node:
        before, found = len(self.tokens), super().simple()
        if len(self.tokens) > before:
            self.ends.append((self.tokens[before].start, self.tokens[-1].end))
        return found


Groups = list[list[Token]]


def tokens_of(text: str) -> tuple[Groups, list[tuple[int, int]]]:
    """The script's words in their order, then, a list for each, those inside a quoted text; and where each command's words begin and end."""
    lines = Lines(text)
    parser = _Spans(text, lines.at)
    parser.script()
    groups: Groups = [sorted(parser.tokens, key=lambda t: (t.start, t.end))]
    for token in parser.tokens:
        if token.raw[:1] in "\"'" and re.search(r"\s", token.raw):
            at = token.start + 1
            inner = re.finditer(r"""(?:[^\s"'\\]|\\[^\n])+|"(?:[^"\\]|\\.)*"|'[^']*'""", token.raw[1:-1])
            groups.append([Token(at + m.start(), at + m.end(), lines.at(at + m.start()), m.group()) for m in inner])
    return groups, parser.ends
