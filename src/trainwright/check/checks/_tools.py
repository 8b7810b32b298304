"""What several checks need: numbers of a setup that follow from others, and short ways to say a finding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..findings import Change, Finding, Severity
from ..setup import Fact, Place, Setup
from ..view import Value, View, whole

ERROR, BLOCKED, WARNING, NOTE = Severity.ERROR, Severity.BLOCKED, Severity.WARNING, Severity.NOTE

# Formats whose keys are arguments of Hugging Face's TrainingArguments, or are called the same.
HF = ("trainer", "trl", "llama_factory", "axolotl")


def said(view: View, key: Value | None, check: str, severity: Severity, what: str, mend: str = "", *changes: Change) -> Finding:
    """A finding at a key of one file."""
    return Finding(check, severity, view.place(key), what, mend, changes)


def about(fact: Fact, check: str, severity: Severity, what: str, mend: str = "", *changes: Change) -> Finding:
    """A finding at a fact's place."""
    return Finding(check, severity, fact.place, what, mend, changes)


def put(view: View, key: Value | None, value: Any) -> Change:
    """Set a key of a file."""
    return Change(view.document.name, key.path if key else (), value)


def drop(view: View, key: Value) -> Change:
    """Delete a key of a file."""
    return Change(view.document.name, key.path, remove=True)


def rename(view: View, key: Value, name: str) -> Change:
    """Keep a key's value under another name."""
    return Change(view.document.name, key.path, rename=name)


def degree(setup: Setup, name: str) -> int:
    """A parallel degree of ``strategy.``, 1 where it is not said."""
    return whole(setup.value(f"strategy.{name}")) or 1


def world(setup: Setup) -> int | None:
    """Processes in all: said, or machines x GPUs of a machine, or the cluster that was asked about, which also counts the machines that nobody said."""
    found = whole(setup.value("launch.world_size"))
    if found:
        return found
    machines, per_node = setup.fact("launch.nodes"), whole(setup.value("launch.gpus_per_node"))
    nodes, asked = whole(machines.value) if machines else None, asked_gpus(setup)
    if per_node and (machines is None or machines.rank < 0) and asked and asked % per_node == 0:
        return asked
    return per_node * (nodes or 1) if per_node else asked


def asked_gpus(setup: Setup) -> int | None:
    """GPUs of ``--on 64xH100``."""
    from ...spec.run import parse_cluster

    on = setup.asked.get("on")
    if isinstance(on, str) and re.match(r"\s*\d+\s*[x×]", on):
        table = parse_cluster(on)
        return int(table["nodes"]) * int(table["gpus_per_node"])
    if isinstance(on, dict) and whole(on.get("nodes")) and whole(on.get("gpus_per_node")):
        return int(on["nodes"]) * int(on["gpus_per_node"])
    return None


def world_place(setup: Setup) -> Place:
    """The place that says how many processes there are."""
    for name in ("launch.world_size", "launch.gpus_per_node", "launch.nodes"):
        fact = setup.fact(name)
        if fact is not None:
            return fact.place
    return first_place(setup)


def first_place(setup: Setup) -> Place:
    return Place(setup.readings[0].document.name if setup.readings else "launch line")


def data_ranks(setup: Setup) -> int | None:
    """Data-parallel ranks: said, or what tp, pp and cp leave of the world where that is whole."""
    found = whole(setup.value("strategy.dp"))
    if found:
        return found
    total, rest = world(setup), degree(setup, "tp") * degree(setup, "pp") * degree(setup, "cp")
    return total // rest if total and total % rest == 0 else None


def few(values: Iterable[Any], most: int = 6) -> str:
    """``1, 2, 4, ...``"""
    found = [str(v) for v in values]
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def divisors(n: int, most: int = 4096) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
