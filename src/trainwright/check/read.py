"""Files and a launch line -> one `Setup`. Nothing is run; what cannot be read is a problem of its document, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import syntax
from .document import Document
from .formats import FORMATS
from .setup import Reading, Setup

LAUNCH = "launch line"
UNKNOWN = "unknown"


def read_setup(files: Mapping[str, bytes | str], launch: str | None = None, asked: Mapping[str, Any] | None = None) -> Setup:
    """`files`: name -> what is in it; `launch`: the command that starts the run (it wins); `asked`: model and cluster of the command line."""
    scripts = {name.rpartition("/")[2]: raw for name, raw in files.items()}

    def others(name: str) -> str | None:
        found = scripts.get(name)
        return syntax.decoded(found)[0] if found is not None else None

    documents: list[Document] = []
    if launch and launch.strip():
        documents += [d for d in syntax.shell.read(LAUNCH, launch, others) if d.parent or d.problems]
    for name, raw in files.items():
        documents += syntax.read(name, raw, others)
    formats = [pair for d in documents for pair in _with_parts(d)]
    readings = [_read(d, f, {}) for d, f in formats]
    values = Setup(tuple(readings), asked or {})
    context = {"values": _values(values), "readings": tuple(readings)}
    return Setup(tuple(_read(d, f, context) for d, f in formats), asked or {})


def read_document(name: str, text: bytes | str) -> Document:
    """The first document of a file: what an editor of the file works on."""
    return syntax.read(name, text)[0]


def _with_parts(document: Document) -> list[tuple[Document, Any]]:
    """The document and those that stand inside it, each with its format."""
    form = _format(document)
    inner = form.parts(document) if form is not None else []
    return [(document, form), *((d, _format(d)) for d in inner)]


def _format(document: Document) -> Any:
    """The format that is surest of the document; None where none is."""
    if document.data is None:
        return None
    scored = sorted(((f.recognizes(document), name) for name, f in FORMATS.items()), reverse=True)
    return FORMATS[scored[0][1]] if scored and scored[0][0] > 0 else None


def _read(document: Document, form: Any, context: Mapping[str, Any]) -> Reading:
    template = any(p.kind == "template" for p in document.problems)
    if form is None:
        return Reading(document, UNKNOWN, template=template)
    found = form.read(document, context)
    if not template:
        return found
    return Reading(document, found.format, found.facts, found.unknown, found.open, fragment=True, template=True)


def _values(setup: Setup) -> dict[str, Any]:
    """Field -> the winner, what the batch keys make of each other included."""
    names = {f.field for r in setup.readings for f in r.facts}
    values = {n: setup.value(n) for n in names}
    total = values.get("launch.world_size") or (values.get("launch.nodes") or 1) * (values.get("launch.gpus_per_node") or 0)
    micro, steps = values.get("strategy.micro_batch_size"), values.get("training.accumulation", 1)
    if total and micro and "training.global_batch_size" not in values:
        values["training.global_batch_size"] = micro * steps * total
    return values
