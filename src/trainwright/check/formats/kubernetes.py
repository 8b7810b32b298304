"""Kubernetes: TrainJob, PyTorchJob, JobSet, MPIJob, RayJob, plain Job and Pod; the command of each container is read as the shell would."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .. import syntax
from ..document import Document, Path
from ..setup import Reading
from ..syntax import shell
from . import Format
from ._facts import Facts, dig, whole

GPU = re.compile(r"^(nvidia|amd)\.com/gpu$|^nvidia\.com/mig-|^aws\.amazon\.com/neuron")


def recognizes(document: Document) -> float:
    data = document.data
    return 1.0 if document.syntax in ("yaml", "json") and isinstance(data, Mapping) and "apiVersion" in data and "kind" in data else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    kind = str(document.data.get("kind"))
    facts.take("launch.nodes", whole, ("spec", "trainer", "numNodes"), ("spec", "mlPolicy", "numNodes"))
    facts.take(
        "launch.gpus_per_node",
        whole,
        ("spec", "trainer", "numProcPerNode"),
        ("spec", "mlPolicy", "torch", "numProcPerNode"),
        ("spec", "nprocPerNode"),
    )
    facts.take("launch.gpus_per_node", whole, ("spec", "slotsPerWorker"))
    if kind in ("PyTorchJob", "MPIJob", "TFJob"):
        _replicas(facts)
    elif kind in ("Job", "JobSet"):
        for path in _find(document.data, ("completions", "parallelism")):
            facts.say("launch.nodes", whole(dig(document.data, path)), path)
            break
    for path in _find(document.data, None):
        if GPU.match(str(path[-1])) and "limits" in path:
            facts.say("launch.gpus_per_node", whole(dig(document.data, path)), path)
            break
    return facts.reading("kubernetes", fragment=True)


def _replicas(facts: Facts) -> None:
    """Master and workers: a machine each."""
    for table in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        path = facts.path("spec", table)
        specs = dig(facts.document.data, path) if path else None
        if isinstance(specs, Mapping):
            counts = {role: whole(spec.get("replicas", 1)) for role, spec in specs.items() if isinstance(spec, Mapping)}
            working = [n for role, n in counts.items() if role != "Launcher"]
            if working and all(working):
                facts.say("launch.nodes", sum(n for n in working if n), path)


def _find(data: Any, names: tuple[str, ...] | None, path: Path = (), depth: int = 0) -> Iterator[Path]:
    """Paths of all keys, or of these, outermost first."""
    if depth > 20:
        return
    if isinstance(data, Mapping):
        for key, value in data.items():
            if names is None or key in names:
                yield (*path, key)
            yield from _find(value, names, (*path, key), depth + 1)
    elif isinstance(data, list):
        for i, value in enumerate(data[:100]):
            yield from _find(value, names, (*path, i), depth + 1)


def parts(document: Document) -> list[Document]:
    """What the containers start."""
    if document.data.get("kind") == "ConfigMap":
        return _files(document)
    found: list[Document] = []
    for path in _find(document.data, ("containers", "trainer", "initContainers")):
        holders = dig(document.data, path)
        for i, holder in enumerate(holders if isinstance(holders, list) else [holders]):
            if isinstance(holder, Mapping) and path[-1] != "initContainers":
                here = (*path, i) if isinstance(holders, list) else path
                found += _started(document, holder, here)
    return found


def _files(document: Document) -> list[Document]:
    """What a ConfigMap holds: files, each with the lines that they have here."""
    found: list[Document] = []
    data = document.data.get("data")
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if isinstance(value, str) and str(name).endswith((".json", ".yaml", ".yml", ".toml")):
            above = document.line(("data", name)) or 1
            inside = syntax.read(str(name), "\n" * above + value)
            found += [replace(d, name=document.name, text=document.text, parent=document.name, part=str(name)) for d in inside]
    return found


def _started(document: Document, holder: Mapping[str, Any], path: Path) -> list[Document]:
    lists = [holder.get(key) for key in ("command", "args")]
    words = [str(w) for found in lists if isinstance(found, list) for w in found]
    if not words or sum(map(len, words)) > 200_000:
        return []
    key = "args" if holder.get("args") else "command"
    line = document.line((*path, "command" if holder.get("command") else key)) or 1
    listed = holder.get("env")
    env: list[Any] = listed if isinstance(listed, list) else []
    given = {str(e["name"]): str(e["value"]) for e in env if isinstance(e, Mapping) and "name" in e and "value" in e}
    script = next((i for i, w in enumerate(words) if w in ("-c", "-lc", "-ec", "-xc")), None)
    if script is not None and script + 2 == len(words) and words[0].rpartition("/")[2] in ("bash", "sh", "zsh"):
        at = _line(document, path, holder, words[script + 1]) or line
        return shell.inside(document.name, document.text, words[script + 1], at, given)
    text = " ".join(re.sub(r"\$\((\w+)\)", r"${\1}", w) if re.fullmatch(r"\S*\$\(\w+\)\S*", w) else shlex.quote(w) for w in words)
    return shell.inside(document.name, document.text, text.replace("\n", " "), line, given)


def _line(document: Document, path: Path, holder: Mapping[str, Any], script: str) -> int | None:
    """The line on which the text of a script begins: behind the | of its block."""
    for key in ("command", "args"):
        words = holder.get(key)
        if isinstance(words, list) and script in words:
            found = document.lines.get((*path, key, words.index(script)))
            return found + 1 if found and "\n" in script else found
    return None


FORMAT = Format(
    "kubernetes",
    "Kubernetes",
    recognizes,
    read,
    ("k8s", "trainjob", "pytorchjob", "jobset"),
    "kubeflow.github.io/trainer, kubernetes.io/docs",
    parts,
)
