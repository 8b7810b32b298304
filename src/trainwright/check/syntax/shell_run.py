"""Follows a script through its branches and notes the commands that it would start, with every word that can be known. Starts none of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..document import Problem
from .shell_expand import OUTSIDE, Expander, State
from .shell_parser import DECLARES, Parser
from .shell_test import UNSET, bracket, expression, test_text
from .shell_tree import Assign, Case, Condition, Function, Group, If, Loop, Node, Simple, Word
from .shell_values import Text, compute, joined, text
from .source import Broken

MOST_STATES = 8  # ways through undecided branches that are kept
MOST_STEPS = 5_000
MOST_COMMANDS = 400
SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "dash")
# Words that a script may begin a line with and that start no training.
QUIET = frozenset((
    "echo", "printf", "cd", "set", "unset", "mkdir", "rm", "cp", "mv", "ls", "module", "conda", "pip", "pip3", "sleep", "wait", "trap", "kill", "cat", "tee",
    "chmod", "chown", "date", "hostname", "nvidia-smi", "shopt", "ulimit", "touch", "wget", "curl", "git", "apt-get", "apt",
    "tar", "unzip", "which", "true",
    "false", "test", "[", "grep",
    "sed", "awk", "head", "tail", "ln", "popd", "pushd", "local", "alias", "read", ":", "scontrol", "getent", "clear", "df", "free",
    "huggingface-cli", "pkill", "source", ".", "return", "exit", "break", "continue", "shift", "let", "squeue", "ray", "tmux", "screen", "seq",
))  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command as it would be started: its words, ``NAME=value`` before it, the branches that lead to it."""

    words: tuple[Text, ...]
    environment: tuple[tuple[str, Text], ...]
    line: int
    label: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """A here-document that the script writes: to a file (`target`, as far as known) or into a variable or a command."""

    text: Text
    target: str
    line: int


@dataclass
class Script:
    """What a script says: its commands, the files it writes, its variables at the end, and what disturbed the reading."""

    commands: list[Command] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    variables: dict[str, Text | list[Text]] = field(default_factory=dict)
    assigned: dict[str, int] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    undefined: dict[str, int] = field(default_factory=dict)
    sourced: list[tuple[str, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def follow(
    source: str,
    line_of: Callable[[int], int],
    others: Callable[[str], str | None] = lambda name: None,
    given: Mapping[str, str] | None = None,
) -> Script:
    """The script followed from an environment of `given` variables. `others(name)`: the text of another file of the same call, for ``source``."""
    runner = _Runner(others)
    parser = Parser(source, line_of)
    start = State({name: text(value) for name, value in (given or {}).items()})
    states = runner.body(parser.script(), [start], 0)
    script = runner.script
    script.problems += parser.problems + runner.expander.problems
    if states:
        script.variables = states[0].variables
    script.used, script.undefined = runner.expander.used, runner.expander.undefined
    return script


class _Runner:
    def __init__(self, others: Callable[[str], str | None]) -> None:
        self.script, self.expander, self.others = Script(), Expander(), others
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.steps = 0

    def body(self, nodes: Iterable[Node], states: list[State], depth: int) -> list[State]:
        for node in nodes:
            self.steps += 1
            if self.steps > MOST_STEPS or depth > 30:
                return states
            states = merged([s for before in states for s in ([before] if before.dead else self.node(node, before, depth))])
        return states

    def node(self, node: Node, state: State, depth: int) -> list[State]:
        if isinstance(node, Simple):
            return self.simple(node, state, depth)
        if isinstance(node, If):
            return self.branch(node, state, depth)
        if isinstance(node, Case):
            return self.case(node, state, depth)
        if isinstance(node, Loop):
            return self.loop(node, state, depth)
        if isinstance(node, Group):
            return self.body(node.body, [state], depth + 1)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
        return [state]

    def branch(self, node: If, state: State, depth: int) -> list[State]:
        """Takes the branch whose condition holds; where that cannot be known, every one, the first first. A branch that ends the script is left."""
        ways: list[State] = []
        bodies = [(t, b) for t, b in node.branches] + [((), node.otherwise)]
        for test, body in bodies:
            verdict, assumed = self.test(test, state) if test else (True, False)
            if verdict is False and not assumed:
                continue
            if verdict is False:  # only since nothing set the variable: kept as the last resort
                continue
            label = " ".join(str(test_text(test)).split())[:60] if verdict is None else ""
            ways += self.body(body, [state.fork(label)], depth + 1)
            if verdict is True and not (assumed and all(w.dead for w in ways)):
                break
        alive = [w for w in ways if not w.dead]
        if alive:
            return alive
        if ways and len(node.branches) == 1 and not node.otherwise:
            return [state]  # a guard that would have ended the script: read on as if it had not
        rest = [s for t, b in node.branches for s in self.body(b, [state.fork()], depth + 1) if not s.dead]
        return rest or ways or [state]

    def case(self, node: Case, state: State, depth: int) -> list[State]:
        value = self.expander.string(node.word, state)
        if not value.open:
            for patterns, body in node.branches:
                if any(fnmatch.fnmatchcase(str(value), str(self.expander.string(p, state))) for p in patterns):
                    found = self.body(body, [state.fork()], depth + 1)
                    alive = [s for s in found if not s.dead]
                    if alive or str(value):
                        return alive or found
                    break
            else:
                if str(value):
                    return [state]
        ways = []
        for patterns, body in node.branches:
            label = f"{value}={'|'.join(str(self.expander.string(p, state)) for p in patterns)}"[:60]
            ways += [s for s in self.body(body, [state.fork(label)], depth + 1) if not s.dead]
        return ways or [state]

    def loop(self, node: Loop, state: State, depth: int) -> list[State]:
        if node.test or not node.name:
            ahead = self.body(node.body, [state.fork()], depth + 1)  # its commands count, what it sets is not certain
            if node.test and isinstance(node.test[0], Simple):
                first = node.test[0]
                if isinstance(first, Simple) and first.words and str(self.expander.string(first.words[0], state)) in ("true", ":"):  # type: ignore[arg-type]
                    return [s for s in ahead if not s.dead] or [state]
            return [state]
        words = node.items if node.items is not None else ()
        items = [f for w in words for f in self.expander.fields(w, state)][:4]
        if not items or any(i.open for i in items):
            items = [text(f"${node.name}", node.line, True)]
        states = [state]
        for item in items:
            self.script.assigned.setdefault(node.name, node.line)
            for s in states:
                s.set(node.name, item)
            states = self.body(node.body, states, depth + 1)
        for s in states:
            s.dead = False
        return states

    def test(self, nodes: tuple[Node, ...], state: State) -> tuple[bool | None, bool]:
        """(holds, assumed): None where it cannot be known; `assumed` where it hangs on a variable that nothing set (taken as unset)."""
        verdict: bool | None = None
        assumed = False
        before = ";"
        for node in nodes:
            if isinstance(node, Simple):
                self.assignments(node, state)
                words = [f for w in node.words if isinstance(w, tuple) for f in self._test_fields(w, state)]
                one, guess = bracket(words)
            elif isinstance(node, Condition):
                one, guess = self.condition(node, state)
            else:
                one, guess = None, False
            if before == "&&":
                verdict = False if verdict is False or one is False else None if None in (verdict, one) else True
            elif before == "||":
                verdict = True if verdict or one else None if None in (verdict, one) else False
            else:
                verdict = one
            assumed |= guess
            before = getattr(node, "end", ";")
        return verdict, assumed

    def _test_fields(self, word: Word, state: State) -> list[Text]:
        """As `fields`, but a name that nothing set is an empty word marked as such."""
        if len([p for p in word if p.kind != "text" or p.value]) == 1:
            part = next(p for p in word if p.kind != "text" or p.value)
            if part.kind == "var" and re.fullmatch(r"[A-Za-z_]\w*", part.value) and part.value not in state.variables:
                self.expander.used.setdefault(part.value, part.line)
                return [text(f"${part.value}", part.line, True)] if OUTSIDE.match(part.value) else [UNSET]
            if part.kind == "var" and re.fullmatch(r"[A-Za-z_]\w*(:?[-+].*)?", part.value) and not self.expander.fields(word, state):
                return [Text()]
        return self.expander.fields(word, state) or ([Text()] if word else [])

    def condition(self, node: Condition, state: State) -> tuple[bool | None, bool]:
        if node.kind == "((":
            value = self.expander.arithmetic(node.text, node.line, state)
            found = None if value.open else compute(str(value))
            return (None if found is None else bool(found)), False
        parser = Parser(node.text.replace("\n", " "), lambda _: node.line)
        words: list[Text] = []
        while parser.at < len(parser.text):
            parser.blank()
            before = parser.at
            if before >= len(parser.text):
                break
            try:
                word = parser.word()
            except Broken:
                return None, False
            if parser.at == before:
                words.append(text(parser.text[parser.at : parser.at + 2] if parser.text[parser.at] in "&|" else parser.text[parser.at]))
                parser.at += 2 if parser.text[parser.at] in "&|" else 1
            else:
                words += self._test_fields(word, state)
        return expression(words)

    def assignments(self, node: Simple, state: State) -> None:
        for a in node.assigns:
            self.assign(a, state)

    def assign(self, a: Assign, state: State) -> None:
        self.script.assigned.setdefault(a.name, a.line)
        before = state.variables.get(a.name)
        if a.array and not a.index:
            items = [f for w in a.value for f in self.expander.fields(w, state)]  # type: ignore[arg-type]
            state.set(a.name, (before if isinstance(before, list) else [before] if before else []) + items if a.add else items)
            return
        value = self.expander.string(a.value, state)  # type: ignore[arg-type]
        if a.index:
            return
        if a.add and isinstance(before, list):
            state.set(a.name, [*before, value])
        else:
            state.set(a.name, before + value if a.add and isinstance(before, Text) else value)

    def simple(self, node: Simple, state: State, depth: int) -> list[State]:
        declares = [w for w in node.words if isinstance(w, Assign)]
        for a in declares:
            self.assign(a, state)
            self.script.exported.setdefault(a.name, a.line)
        if not node.words:
            self.assignments(node, state)
            self.here_documents(node, (), state)
            return [state]
        words = [f for w in node.words if isinstance(w, tuple) for f in self.expander.fields(w, state)]
        environment = tuple((a.name, self.expander.string(a.value, state)) for a in node.assigns if not a.array)  # type: ignore[arg-type]
        self.here_documents(node, words, state)
        if not words:
            return [state]
        return self.started(node, words, environment, state, depth)

    def started(self, node: Simple, words: list[Text], environment: tuple[tuple[str, Text], ...], state: State, depth: int) -> list[State]:
        name = str(words[0])
        if name in DECLARES:
            for w in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", str(w)):
                    self.script.exported.setdefault(str(w), w.line)
            return [state]
        if name in ("exit", "return") or (name == "exec" and len(words) == 1):
            return self.ended(node, state)
        if name in ("source", ".") and len(words) > 1:
            return self.source(words[1], state, depth)
        if name in self.functions and depth < 12:
            inner = state.fork()
            inner.arguments = tuple(words[1:])
            found = self.body(self.functions[name], [inner], depth + 1)
            for s in found:
                s.arguments, s.dead = state.arguments, False
            return found
        if name == "eval":
            return self.inside(joined(words[1:]), state, depth, ())
        words = _own(words, state)
        for i, word in enumerate(words[:-1]):
            if str(word) in SHELLS and str(words[i + 1]) in ("-c", "-lc", "-ic", "-ec", "-xc", "-exc") and i + 2 < len(words):
                return self.inside(words[i + 2], state, depth, tuple(words[:i]), tuple(words[i + 4 :]), environment)
        if name not in QUIET and len(self.script.commands) < MOST_COMMANDS:
            self.script.commands.append(Command(tuple(words), environment, node.line, state.label))
        return [state]

    def ended(self, node: Simple, state: State) -> list[State]:
        state.dead = True
        return [state]

    def inside(
        self,
        source: Text,
        state: State,
        depth: int,
        prefix: tuple[Text, ...],
        arguments: tuple[Text, ...] = (),
        environment: tuple[tuple[str, Text], ...] = (),
    ) -> list[State]:
        """``bash -c '...'`` and ``eval``: the text is a script of its own; `prefix` (srun and its options) stands before each of its commands."""
        if depth > 12:
            return [state]
        parser = Parser(str(source), source.line_of())
        before = len(self.script.commands)
        inner = state.fork()
        if prefix or arguments:
            inner.arguments = arguments
        found = self.body(parser.script(), [inner], depth + 1)
        self.script.problems += parser.problems
        if prefix or environment:
            self.script.commands[before:] = [
                Command((*prefix, *c.words), (*environment, *c.environment), c.line, c.label) for c in self.script.commands[before:]
            ]
        return [state] if prefix else [s for s in found if not s.dead] or [state]

    def source(self, name: Text, state: State, depth: int) -> list[State]:
        other = self.others(str(name).rpartition("/")[2]) if depth < 6 else None
        if other is None:
            self.script.sourced.append((str(name), name.line))
            return [state]
        line = name.line
        parser = Parser(other, lambda _: line)
        found = self.body(parser.script(), [state], depth + 1)
        return [s for s in found if not s.dead] or [state]

    def here_documents(self, node: Simple, words: Iterable[Text], state: State) -> None:
        for document in node.heredocs:
            rows = document.text.splitlines(keepends=True)
            if document.expands:
                value = Text()
                for number, row in enumerate(rows):
                    line = document.line + number
                    value = value + self.expander.string(self.expander.quoted_row(row, line), state)
            else:
                value = Text(tuple((row, document.line + i, False) for i, row in enumerate(rows)))
            listed = [str(w) for w in words]
            target = str(self.expander.string(node.target, state)) if node.target else ""
            if listed[:1] == ["read"] and len(listed) > 1:
                state.set(listed[-1], value)
                self.script.assigned.setdefault(listed[-1], node.line)
            elif listed[:1] == ["tee"]:
                target = target or listed[-1]
            self.script.written.append(Written(value, target, document.line))


def _own(words: list[Text], state: State) -> list[Text]:
    """``set --`` and ``shift`` change the arguments; ``exec``, ``nohup`` and the like only stand before a command."""
    name = str(words[0])
    if name == "set" and len(words) > 1 and str(words[1]) == "--":
        state.arguments = tuple(words[2:])
    if name == "shift" and state.arguments:
        state.arguments = state.arguments[1:]
    return words[1:] if name in ("exec", "nohup", "time", "sudo", "command") and len(words) > 1 else words


def merged(states: list[State]) -> list[State]:
    """States that say the same are one; at most `MOST_STATES` are kept, the first first."""
    found: list[State] = []
    for state in states:
        if not any(s.variables == state.variables and s.dead == state.dead and s.arguments == state.arguments for s in found):
            found.append(state)
        if len(found) >= MOST_STATES:
            break
    return found
