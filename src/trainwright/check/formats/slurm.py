"""Slurm: the header of a batch script and srun's options; and scripts without a header, for their variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..setup import Reading
from ..syntax.shell_run import Script
from ..syntax.shell_values import Text
from . import Format
from ._facts import Facts, dig, launched, text, whole


def recognizes(document: Document) -> float:
    if launched(document, "srun"):
        return 1.0
    return 0.9 if document.syntax == "shell" and isinstance(document.detail, Script) and document.data else 0.0


def recognizes_script(document: Document) -> float:
    return 0.5 if document.syntax == "shell" and isinstance(document.detail, Script) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    above = () if launched(document, "srun") else ("sbatch",)
    facts = Facts(document, rank=2 if not above else 0)
    facts.take("launch.nodes", lambda v: whole(str(v).rpartition("-")[2]), (*above, "nodes"), (*above, "N"))
    for name in ("gpus-per-node", "gres", "gpus-per-task", "ntasks-per-node"):
        path = facts.path(*above, name)
        count = _gpus(dig(facts.document.data, path), name) if path else None
        if path and count:
            facts.say("launch.gpus_per_node", count, path)
            break
    facts.take("cluster.constraint", text, (*above, "constraint"))
    _environment(facts, document)
    return facts.reading("slurm", fragment=True)


def read_script(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    _environment(facts, document)
    return facts.reading("shell", fragment=True)


def _gpus(value: Any, name: str) -> int | None:
    """``gpu:a100:8``, ``gpu:8``, ``8``; tasks of a node count where nothing says how many GPUs there are."""
    words = str(value)
    if name == "gres" and "gpu" not in words:
        return None
    hit = re.search(r"(\d+)(?:\(.*\))?$", words.split(",")[0])
    count = int(hit.group(1)) if hit and len(hit.group(1)) < 6 else None
    return None if name in ("gpus-per-task", "ntasks-per-node") and count == 1 else count


def _environment(facts: Facts, document: Document) -> None:
    """CUDA_VISIBLE_DEVICES and the like, which a script exports; what an Accelerator accumulates unless its program says otherwise."""
    script = document.detail
    if not isinstance(script, Script):
        return
    value = script.variables.get("CUDA_VISIBLE_DEVICES")
    if isinstance(value, Text) and re.fullmatch(r"\d+(,\d+)*", str(value)):
        facts.found.append(_fact(facts, "launch.visible_gpus", str(value).count(",") + 1, value.line))
    steps = script.variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if isinstance(steps, Text) and whole(str(steps)):
        facts.found.append(_fact(facts, "training.accumulation", whole(str(steps)), steps.line))


def _fact(facts: Facts, field: str, value: Any, line: int) -> Any:
    from ..setup import Fact, Place

    return Fact(field, value, Place(facts.document.name, line), value, 1)


FORMAT = (
    Format("slurm", "Slurm", recognizes, read, ("sbatch",), "slurm.schedmd.com/sbatch.html"),
    Format("shell", "shell script", recognizes_script, read_script, ("bash",), ""),
)
