"""From a program to processes on GPUs: torchrun on one node or on every node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..resolve import Run
from .base import Options, Setting, said
from .shell import FROM_HERE, HEAD, Raw, command, exports, flags_of, number

Flags = list[tuple[str, object]]


@dataclass(frozen=True)
class Program:
    """What every rank runs: words after the interpreter's launcher (a script, or -m and a module) and its flags."""

    words: tuple[str, ...]
    flags: tuple[tuple[str, object], ...] = ()
    tail: tuple[str, ...] = ()  # words after the flags
    here: bool = True  # the program stands beside the script, or is found by its module
    stop_signal: str = "USR1"  # the signal at which it saves and ends; empty where it knows none

    @property
    def arguments(self) -> list[str]:
        """All words, unquoted, as a process gets them."""
        found = list(self.words)
        for flag, value in self.flags:
            values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
            found += [flag, *(str(v) for v in values)]
        return found + list(self.tail)


def torchrun(run: Run, options: Options, nodes: str = "", restarts: int = 0) -> Flags:
    """torchrun's flags; several nodes meet at ``$HEAD_NODE``."""
    count = nodes or str(run.cluster.nodes)
    flags: Flags = [("--nnodes", count), ("--nproc-per-node", run.cluster.gpus_per_node)]
    if restarts:
        flags.append(("--max-restarts", restarts))
    if count == "1":
        return [*flags, ("--standalone", True)]
    return [
        *flags,
        ("--rdzv-id", options.name),
        ("--rdzv-backend", "c10d"),
        ("--rdzv-endpoint", Raw(f'"$HEAD_NODE:{options.port}"')),
    ]


def script(run: Run, options: Options, program: Program, settings: Iterable[Setting], nodes: str = "", restarts: int = 0) -> str:
    """``launch.sh``: run it once, or on every node with HEAD_NODE set."""
    text = HEAD + (FROM_HERE if program.here else "# to be run in the folder of the engine's own checkout\n") + "\n" + exports(settings)
    if (nodes or str(run.cluster.nodes)) != "1":
        text += '\n: "${HEAD_NODE:?set HEAD_NODE to the address of the first node and run this script on every node}"\n'
    return text + "\n" + command(["torchrun"], [*torchrun(run, options, nodes, restarts)], after=program_text(program))


def program_text(program: Program) -> str:
    from .shell import quote

    return command([quote(w) for w in program.words], program.flags, tail=" ".join(quote(w) for w in program.tail)).rstrip("\n")


def launched(files: Mapping[str, str]) -> dict[str, Any]:
    """{"cluster.nodes", "cluster.gpus_per_node"} of the emitted launch scripts, dotted."""
    for name in ("launch.sh", "job.sbatch"):
        flags = flags_of(files.get(name, ""))
        if number(flags, "--nproc-per-node"):
            return {"cluster.nodes": number(flags, "--nnodes"), "cluster.gpus_per_node": number(flags, "--nproc-per-node")}
    return {}


def world(fields: Mapping[str, Any]) -> int | None:
    """GPUs of what `launched` found."""
    nodes, per_node = fields.get("cluster.nodes"), fields.get("cluster.gpus_per_node")
    return nodes * per_node if nodes and per_node else None


__all__ = ["Flags", "Program", "launched", "program_text", "said", "script", "torchrun", "world"]
