"""What a test of a script says, as far as it can be known: true, false, or None; and whether an argument that nobody gave was taken for empty."""

from __future__ import annotations

import fnmatch
import re

from .shell_tree import Condition, Node, Simple
from .shell_values import Text, compute

UNSET = Text((("", 0, False),))


def test_text(nodes: tuple[Node, ...]) -> str:
    node = nodes[0] if nodes else None
    if isinstance(node, Condition):
        return node.text
    if isinstance(node, Simple):
        return " ".join("".join(p.value for p in w) for w in node.words if isinstance(w, tuple))
    return ""


def bracket(words: list[Text]) -> tuple[bool | None, bool]:
    """``[ ... ]`` and ``test ...``; any other command cannot be known."""
    names = [str(w) for w in words]
    if names[:1] == ["["] and names[-1:] == ["]"]:
        return expression(words[1:-1])
    if names[:1] == ["test"]:
        return expression(words[1:])
    return ({"true": True, "false": False}.get(names[0]) if len(names) == 1 else None), False


def expression(words: list[Text]) -> tuple[bool | None, bool]:
    """Three-valued: ``-z -n = == != -eq ...``, ``!``, ``&& || -a -o``."""
    words = [not_given(w) for w in words]
    names = [str(w) for w in words]
    for operator, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if operator in names:
            at = names.index(operator)
            left, right = expression(words[:at]), expression(words[at + 1 :])
            sides = (left[0], right[0])
            known = combine(bool(s) for s in sides)
            certain = None not in sides or (combine is any and True in sides) or (combine is all and False in sides)
            return (known if certain else None), left[1] or right[1]
    if names[:1] == ["!"]:
        found, assumed = expression(words[1:])
        return (None if found is None else not found), assumed
    assumed = any(w is UNSET for w in words)
    if len(words) == 1:
        return (None if words[0].open else bool(names[0])), assumed
    if len(words) == 2 and names[0] in ("-z", "-n"):
        if words[1].open and not any(not p[2] and p[0] for p in words[1].pieces) and not str(words[1]).startswith("$("):
            return None, False
        empty = not names[1]
        return (empty if names[0] == "-z" else not empty), assumed
    if len(words) == 3:
        return _compared(words[0], names[1], words[2]), assumed
    return None, assumed


def not_given(word: Text) -> Text:
    """An argument of the script that nobody gave is an empty word."""
    return UNSET if word.open and re.fullmatch(r"\$\d+", str(word)) else word


def _compared(a: Text, operator: str, b: Text) -> bool | None:
    if a.open or b.open:
        return None
    left, right = str(a), str(b)
    if operator in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatch.fnmatchcase(left, right)
    tests = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
    if operator in tests:
        found = compute(f"({left or 0}) {tests[operator]} ({right or 0})")
        return None if found is None else bool(found)
    return None
