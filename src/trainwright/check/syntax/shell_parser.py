"""A shell script into its tree: Bash's grammar as far as launch scripts go; nothing here runs or expands anything."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..document import Problem
from .shell_reader import META, Reader
from .shell_tree import Assign, Case, Condition, Function, Group, Heredoc, If, Loop, Node, Simple, Word
from .source import DEEPEST, Broken

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?)=")
DECLARES = ("export", "local", "declare", "readonly", "typeset")


@dataclass
class Parser(Reader):
    """Statements out of words."""

    depth: int = 0

    def script(self) -> tuple[Node, ...]:
        """Every statement; what follows a place that no shell can read is left out and a problem says so."""
        found: list[Node] = []
        while True:
            try:
                found += self.body(())
                if self.at >= len(self.text):
                    return tuple(found)
                self.problems.append(Problem("broken", f"{self.text[self.at]!r} belongs to no command", self.line()))
                self.at += 1
            except Broken as error:
                self.problems.append(Problem(error.kind, error.message, error.line))
                return tuple(found)

    def gap(self) -> None:
        """Blanks, line ends and semicolons between statements."""
        while True:
            self.blank()
            if self.peek() == "\n":
                self.newline()
            elif self.peek() in (";", "&") and self.peek(2) != ";;":
                self.at += 1
            else:
                return

    def body(self, ends: tuple[str, ...]) -> list[Node]:
        """Statements up to one of the words `ends` (left unread) or the end of the text."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Broken("blocks are nested too deeply", self.line())
        found: list[Node] = []
        while True:
            self.gap()
            if self.at >= len(self.text) or self.peek() == ")" or self.peek(2) == ";;" or self.keyword() in ends:
                self.depth -= 1
                return found
            before = self.at
            found.append(self.statement())
            if self.at == before:
                raise Broken(f"{self.peek()!r} belongs to no command", self.line())

    def keyword(self) -> str:
        found = re.compile(r"[a-z]+|\}").match(self.text, self.at)
        if not found:
            return ""
        after = self.text[found.end() : found.end() + 1]
        return found.group() if not after or after in META else ""

    def take(self, word: str) -> None:
        self.gap()
        if self.keyword() != word:
            raise Broken(f"expected {word!r}", self.line(), "unclosed")
        self.at += len(word)

    def statement(self) -> Node:
        line, word = self.line(), self.keyword()
        if self.peek(2) == "((":
            return self.raw("((", "))", line)
        if self.peek(2) == "[[" and self.text[self.at + 2 : self.at + 3] in (" ", "\t", "\n"):
            return self.raw("[[", "]]", line)
        if self.peek() == "(":
            self.at += 1
            body = self.body(())
            if self.peek() != ")":
                raise Broken("a ( is never closed", line, "unclosed")
            self.at += 1
            return self.trailed(Group(tuple(body), line))
        if self.peek() == "{" and self.text[self.at + 1 : self.at + 2] in (" ", "\t", "\n"):
            self.at += 1
            return self.trailed(Group(tuple(self.until("}")), line))
        known = {"if": self.branch, "case": self.case, "for": self.loop, "select": self.loop, "while": self.repeat, "until": self.repeat}
        if word in known:
            self.at += len(word)
            return self.trailed(known[word](line))
        if word in ("!", "time"):
            self.at += len(word)
            self.blank()
        function = re.compile(r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))[ \t\n]*(?=\{)").match(
            self.text, self.at
        )
        if function:
            self.at = function.end() + 1
            return self.trailed(Function(function.group(1) or function.group(2), tuple(self.until("}")), line))
        return self.simple()

    def trailed(self, node: Node) -> Node:
        """Redirections behind a block are skipped."""
        self.blank()
        while re.compile(r"\d?[<>]").match(self.text, self.at) or self.peek(2) == "&>":
            self.redirect([])
            self.blank()
        if self.peek() == "|" or self.peek(2) == "&&":
            self.at += 2 if self.peek(2) in ("&&", "||") else 1
        return node

    def until(self, *ends: str) -> list[Node]:
        line = self.line()
        found = self.body(ends)
        if self.keyword() not in ends:
            raise Broken(f"a block that begins here is never closed ({' or '.join(ends)} is missing)", line, "unclosed")
        self.at += len(self.keyword())
        return found

    def raw(self, begin: str, end: str, line: int) -> Condition:
        stop = self.text.find(end, self.at + 2)
        if stop < 0:
            raise Broken(f"{begin} is never closed", line, "unclosed")
        text = self.text[self.at + 2 : stop]
        self.at = stop + 2
        if begin == "[[" and _words_at_odds(text):
            self.problems.append(Problem("broken", f"[[{text[:60]}]] is no condition: a word too many (quotes are missing?)", line))
        self.blank()
        operator = next((o for o in ("&&", "||", "|", "&") if self.text.startswith(o, self.at)), "")
        self.at += len(operator)
        return Condition(begin, text, line, operator)

    def branch(self, line: int) -> Node:
        branches, otherwise = [], []
        word = "if"
        while word in ("if", "elif"):
            test = self.until("then")
            body = self.body(("elif", "else", "fi"))
            branches.append((tuple(test), tuple(body)))
            word = self.keyword()
            if not word:
                raise Broken("an if is never closed with fi", line, "unclosed")
            self.at += len(word)
        if word == "else":
            otherwise = self.until("fi")
        return If(tuple(branches), tuple(otherwise), line)

    def case(self, line: int) -> Node:
        self.blank()
        word = self.word()
        self.take("in")
        branches: list[tuple[tuple[Word, ...], tuple[Node, ...]]] = []
        while True:
            self.gap()
            if self.keyword() == "esac":
                self.at += 4
                return Case(word, tuple(branches), line)
            if self.at >= len(self.text):
                raise Broken("a case is never closed with esac", line, "unclosed")
            if self.peek() == "(":
                self.at += 1
            patterns = []
            while True:
                self.blank()
                patterns.append(self.word())
                self.blank()
                if self.peek() != "|":
                    break
                self.at += 1
            if self.peek() != ")":
                raise Broken("a pattern of case ends with )", self.line())
            self.at += 1
            branches.append((tuple(patterns), tuple(self.body(("esac",)))))
            self.gap()
            if self.peek(2) == ";;":
                self.at += 3 if self.peek(3) == ";;&" else 2
            elif self.keyword() != "esac" and self.at < len(self.text):
                raise Broken("a branch of case ends with ;;", self.line())

    def loop(self, line: int) -> Node:
        self.blank()
        if self.peek(2) == "((":
            self.raw("((", "))", line)
            items: list[Word] | None = []
            name = ""
        else:
            found = NAME.match(self.text, self.at)
            if not found:
                raise Broken("for needs a name", line)
            name, self.at, items = found.group(), found.end(), None
            self.gap()
            if self.keyword() == "in":
                self.at += 2
                items = []
                self.blank()
                while self.at < len(self.text) and self.peek() not in (";", "\n"):
                    before = self.at
                    items.append(self.word())
                    self.blank()
                    if self.at == before:
                        raise Broken("for ... in ends with ; or a line end", self.line())
        self.gap()
        self.until("do") if name == "" and self.keyword() != "do" else self.take("do")
        return Loop(tuple(self.until("done")), line, name, None if items is None else tuple(items))

    def repeat(self, line: int) -> Node:
        test = self.until("do")
        return Loop(tuple(self.until("done")), line, test=tuple(test))

    def simple(self) -> Node:
        line = self.line()
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        heredocs: list[Heredoc] = []
        target: Word | None = None
        while True:
            self.blank()
            c = self.peek()
            if not c or c in "\n;)" or (c == "&" and self.peek(2) != "&>") or c == "|":
                break
            if re.compile(r"\d?[<>]").match(self.text, self.at) or self.peek(2) == "&>":
                target = self.redirect(heredocs) or target
                continue
            if c == "(":
                raise Broken("a ( where no command begins", self.line())
            declares = words and isinstance(words[0], tuple) and plain(words[0]) in DECLARES
            assign = self.assign() if not words or declares else None
            if assign and declares:
                words.append(assign)
            elif assign:
                assigns.append(assign)
            else:
                words.append(self.word())
        operator = next((o for o in ("&&", "||", "|&", "|") if self.text.startswith(o, self.at)), "")
        self.at += len(operator)
        if operator:
            self.blank()
            while self.peek() == "\n":
                self.newline()
                self.blank()
        return Simple(tuple(assigns), tuple(words), line, heredocs, target, operator)

    def redirect(self, heredocs: list[Heredoc]) -> Word | None:
        found = re.compile(r"\d?(<<<|<<-|<<|&>>|&>|>>|>&|<&|>\||<>|>|<)").match(self.text, self.at)
        assert found is not None  # the callers have looked
        operator = found.group(1)
        self.at = found.end()
        self.blank()
        if self.peek() == "(":  # process substitution
            self.nested("(", ")")
            return None
        if operator in ("<<", "<<-"):
            raw = re.compile(r"""\\?['"]?([^\s'";&|<>()]+)['"]?""").match(self.text, self.at)
            if not raw:
                raise Broken("a here-document without a word that ends it", self.line())
            quoted = raw.group()[0] in "\\'\""
            self.at = raw.end()
            self.pending.append((raw.group(1), operator == "<<-", not quoted, heredocs))
            return None
        word = self.word()
        if operator == "<<<":
            return None
        return word if ">" in operator else None

    def assign(self) -> Assign | None:
        found = _ASSIGN.match(self.text, self.at)
        if not found:
            return None
        line = self.line()
        self.at = found.end()
        index = (found.group(2) or "")[1:-1]
        if self.peek() != "(":
            value = self.word() if self.peek() and self.peek() not in META else ()
            return Assign(found.group(1), value, bool(found.group(3)), line, bool(index), index)
        self.at += 1
        items: list[Word] = []
        while True:
            self.blank()
            if self.peek() == "\n":
                self.at += 1
            elif self.peek() == ")":
                self.at += 1
                return Assign(found.group(1), tuple(items), bool(found.group(3)), line, True)
            elif not self.peek():
                raise Broken(f"the array {found.group(1)} is never closed", line, "unclosed")
            elif self.peek() in "&|;<>(":  # illegal, or part of a word that should be quoted
                self.problems.append(Problem("broken", f"{self.peek()} in the array {found.group(1)} must be quoted", self.line()))
                self.at += 1
            else:
                items.append(self.word())


def _words_at_odds(condition: str) -> bool:
    """``a = b c`` without quotes: bash refuses a second word behind an operator."""
    if "&&" in condition or "||" in condition or "(" in condition or '"' in condition or "'" in condition or "`" in condition:
        return False
    words = condition.split()
    return len(words) == 4 and words[0] != "!" and words[1] in ("=", "==", "!=", "-eq", "-ne", "-lt", "-gt", "-le", "-ge")


def plain(word: Word) -> str:
    """The word where it is nothing but text."""
    return "".join(p.value for p in word) if all(p.kind == "text" for p in word) else ""
