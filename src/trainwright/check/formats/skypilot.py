"""SkyPilot: machines and accelerators, and the ``run`` script with its ``envs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..setup import Reading
from ..syntax import shell
from . import Format
from ._facts import Facts, dig, whole


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax != "yaml" or not isinstance(data, Mapping) or "apiVersion" in data:
        return 0.0
    resources = data.get("resources")
    known = {"accelerators", "cloud", "infra", "instance_type", "use_spot", "disk_size", "image_id", "cpus", "any_of"}
    return (
        0.95
        if isinstance(resources, Mapping) and known & resources.keys() and ("run" in data or "setup" in data or "num_nodes" in data)
        else 0.0
    )


def accelerators(value: Any) -> tuple[str, int] | None:
    """``A100-80GB:8``, ``{H100: 8}``, ``[H100:8, A100:8]`` (the first)."""
    if isinstance(value, (list, set)) and value:
        value = next(iter(value))
    if isinstance(value, Mapping) and value:
        name, count = next(iter(value.items()))
        return str(name), whole(count) or 1
    if isinstance(value, str) and value:
        name, _, count = value.partition(":")
        return name, whole(count) or 1
    return None


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    nodes = facts.take("launch.nodes", whole, "num_nodes")
    path = facts.path("resources", "accelerators")
    found = accelerators(dig(document.data, path)) if path else None
    if path and found:
        facts.say("cluster.gpu", found[0], path)
        facts.say("launch.gpus_per_node", found[1], path)
        if not nodes and not facts.has("num_nodes"):
            facts.say("launch.nodes", 1, path)
    return facts.reading("skypilot")


def parts(document: Document) -> list[Document]:
    script, envs = document.data.get("run"), document.data.get("envs")
    if not isinstance(script, str):
        return []
    given = {str(k): str(v) for k, v in envs.items() if isinstance(v, (str, int, float))} if isinstance(envs, Mapping) else {}
    nodes = whole(document.data.get("num_nodes", 1))
    resources = document.data.get("resources")
    found = accelerators(resources.get("accelerators")) if isinstance(resources, Mapping) else None
    given |= {"SKYPILOT_NUM_NODES": str(nodes)} if nodes else {}
    given |= {"SKYPILOT_NUM_GPUS_PER_NODE": str(found[1])} if found else {}
    line = document.line(("run",)) or 1
    return shell.inside(document.name, document.text, script, line + (1 if "\n" in script else 0), given)


FORMAT = Format("skypilot", "SkyPilot", recognizes, read, ("sky",), "docs.skypilot.co/en/latest/reference/yaml-spec.html", parts)
