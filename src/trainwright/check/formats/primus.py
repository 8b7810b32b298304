"""Primus: ``modules.pre_trainer`` with a framework and its ``overrides`` (torchtitan's sections, or Megatron's arguments); model presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..setup import Reading
from . import Format, megatron, torchtitan
from ._facts import Facts, text
from ._interpolate import resolved


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax != "yaml" or not isinstance(data, Mapping):
        return 0.0
    modules = data.get("modules")
    if isinstance(modules, Mapping) and any(
        isinstance(m, Mapping) and {"framework", "overrides", "config"} & m.keys() for m in modules.values()
    ):
        return 0.98
    if "bases" in data or "extends" in data or "includes" in data:
        return 0.6
    job, inner = data.get("job"), data.get("model")
    preset = isinstance(inner, Mapping) and "flavor" in inner and len(data) <= 4
    return 0.6 if preset and (job is None or isinstance(job, Mapping)) else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    found = resolved(document)
    facts = Facts(found)
    modules = found.data.get("modules")
    if not isinstance(modules, Mapping):
        torchtitan.say(facts) if facts.has("model", "flavor") else megatron.say(facts)
        return facts.reading("primus", fragment=True)
    for name, module in modules.items():
        if not isinstance(module, Mapping):
            continue
        at = ("modules", str(name))
        facts.take("model.name", text, (*at, "model"))
        if module.get("framework") == "torchtitan":
            torchtitan.say(facts, *at, "overrides")
        elif module.get("framework") == "megatron":
            megatron.say(facts, *at, "overrides")
    return facts.reading("primus", fragment=True)


FORMAT = Format("primus", "Primus", recognizes, read, ("primus-yaml",), "AMD-AGI/Primus primus/configs, examples")
