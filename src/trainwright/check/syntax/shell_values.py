"""Values of a script: texts that know the line of each piece and whether a piece is still open (a variable that nobody set)."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

LONGEST = 60_000  # characters of one value: a command line of the kernel is 128 KiB
MOST_PIECES = 4_000


@dataclass(frozen=True)
class Text:
    """Pieces (text, line, open)."""

    pieces: tuple[tuple[str, int, bool], ...] = ()

    def __str__(self) -> str:
        return "".join(p[0] for p in self.pieces)

    @property
    def open(self) -> bool:
        return any(p[2] for p in self.pieces)

    @property
    def line(self) -> int:
        """Of the first piece that holds something."""
        return next((p[1] for p in self.pieces if p[0].strip()), self.pieces[0][1] if self.pieces else 0)

    def __add__(self, other: Text) -> Text:
        if not other.pieces or self.size + other.size > LONGEST or len(self.pieces) + len(other.pieces) > MOST_PIECES:
            return self
        if self.pieces and self.pieces[-1][1:] == other.pieces[0][1:] == (other.pieces[0][1], False):
            last, first = self.pieces[-1], other.pieces[0]
            return Text((*self.pieces[:-1], (last[0] + first[0], last[1], False), *other.pieces[1:]))
        return Text(self.pieces + other.pieces)

    @cached_property
    def size(self) -> int:
        return sum(len(p[0]) for p in self.pieces)

    def split(self) -> list[Text]:
        """Words at blanks, each with its own lines."""
        found: list[Text] = []
        current: list[tuple[str, int, bool]] = []
        for text, line, is_open in self.pieces:
            if is_open:
                current.append((text, line, True))
                continue
            bits = re.split(r"([ \t\n]+)", text)
            for i, bit in enumerate(bits):
                if i % 2:
                    found += [Text(tuple(current))] if current else []
                    current = []
                elif bit:
                    current.append((bit, line, False))
        return found + ([Text(tuple(current))] if current else [])

    def line_of(self) -> Callable[[int], int]:
        """Offset in ``str(self)`` -> line."""
        starts, at = [], 0
        for piece in self.pieces:
            starts.append(at)
            at += len(piece[0])

        def line(offset: int) -> int:
            index = max(0, bisect_right(starts, offset) - 1)
            if not self.pieces:
                return 0
            text, first, _ = self.pieces[index]
            return first + text.count("\n", 0, max(0, offset - starts[index]))

        return line


def text(value: object, line: int = 0, is_open: bool = False) -> Text:
    return Text(((str(value), line, is_open),))


def joined(items: Iterable[Text]) -> Text:
    found = Text()
    for i, item in enumerate(items):
        found = found + (text(" ", item.line) if i else Text()) + item
    return found


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if abs(a) < 2**16 and 0 <= b < 64 else _never(),
    ast.LShift: lambda a, b: a << b if 0 <= b < 63 else _never(),
    ast.RShift: lambda a, b: a >> b if 0 <= b < 63 else _never(),
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b,
}  # fmt: skip


def _never() -> int:
    raise ValueError("out of range")


def compute(expression: str) -> int | None:
    """Bash's integer arithmetic over numbers; None where it is none. Division cuts towards zero."""
    if len(expression) > 400 or not re.fullmatch(r"[\d\s+\-*/%()<>=!&|]*", expression):
        return None
    bare = expression.strip().replace("&&", " and ").replace("||", " or ")
    bare = re.sub(r"!(?!=)", " not ", bare)
    try:
        return _compute(ast.parse(bare or "0", mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError, MemoryError):
        return None


def _compute(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**63:
        return int(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
        return found if abs(found) < 2**63 else _never()
    if isinstance(node, ast.UnaryOp):
        value = _compute(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value) if isinstance(node.op, ast.Not) else value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        return int(_COMPARE[type(node.ops[0])](_compute(node.left), _compute(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [_compute(v) for v in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("no arithmetic")
