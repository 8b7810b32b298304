"""A shell script as a tree: words, commands, branches, loops."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """`kind`: text, var (what stands inside ``${}``), cmd (``$(...)``), arith (``$((...))``)."""

    kind: str
    value: str
    line: int
    quoted: bool = False


Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assign:
    name: str
    value: Word | tuple[Word, ...]
    add: bool
    line: int
    array: bool = False
    index: str = ""


@dataclass(frozen=True)
class Heredoc:
    text: str
    line: int
    expands: bool


@dataclass(frozen=True)
class Simple:
    """A command. Its here-documents are filled in at the next line end, so the list is the one thing in this tree that grows."""

    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    line: int
    heredocs: list[Heredoc] = field(default_factory=list)
    target: Word | None = None
    end: str = ""  # the operator behind it: ; & && || |


@dataclass(frozen=True)
class Condition:
    """``[[ ... ]]`` or ``(( ... ))``, as text."""

    kind: str
    text: str
    line: int
    end: str = ""


@dataclass(frozen=True)
class If:
    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    otherwise: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Case:
    word: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]
    line: int


@dataclass(frozen=True)
class Loop:
    """``for``: `name` and `items` (None: the arguments); ``while`` and ``until``: `test`."""

    body: tuple[Node, ...]
    line: int
    name: str = ""
    items: tuple[Word, ...] | None = ()
    test: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Group:
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Function:
    name: str
    body: tuple[Node, ...]
    line: int


Node = Simple | Condition | If | Case | Loop | Group | Function
