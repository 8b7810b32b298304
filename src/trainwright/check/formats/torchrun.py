"""torchrun, ``python -m torch.distributed.launch``, DeepSpeed's launcher, mpirun: how many processes on how many machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..known import keys
from ..setup import Reading
from . import Format
from ._facts import Facts, dig, launched, plain, text, whole


def recognizes(document: Document) -> float:
    return 1.0 if launched(document, "torchrun", "deepspeed", "mpirun") else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document, rank=2)
    nodes = facts.take("launch.nodes", _nodes, "nnodes", "num_nodes")
    per_node = facts.take("launch.gpus_per_node", whole, "nproc_per_node", "num_gpus")
    kind = document.detail.kind
    if kind == "deepspeed" and not per_node:
        _included(facts)
    if kind == "torchrun" and per_node and not nodes and not facts.has("nnodes"):
        facts.say("launch.nodes", 1, facts.path("nproc_per_node"), rank=-1)  # its default, unless the environment (PET_NNODES) says more
    if kind == "mpirun":
        facts.take("launch.world_size", whole, "np", "n")
    facts.take("launch.main_address", text, "master_addr", "rdzv_endpoint")
    known = keys("torchrun").of()
    unknown = tuple((k,) for k in document.data if kind == "torchrun" and known and plain(k) not in known)
    return facts.reading("torchrun", unknown=unknown)


def _nodes(value: Any) -> int | None:
    """``2:4`` is elastic: the largest."""
    return whole(str(value).rpartition(":")[2])


def _included(facts: Facts) -> None:
    """``--include localhost:0,1,2,3``: GPUs by number."""
    path = facts.path("include") or facts.path("i")
    value = str(dig(facts.document.data, path)) if path else ""
    hosts = [h for h in value.split("@") if h]
    counts = {len(h.partition(":")[2].split(",")) for h in hosts if ":" in h}
    if len(counts) == 1:
        facts.say("launch.gpus_per_node", counts.pop(), path, value)
        facts.say("launch.nodes", len(hosts), path, value)


FORMAT = Format(
    "torchrun",
    "torchrun and other launchers",
    recognizes,
    read,
    ("torch-elastic", "mpirun"),
    "torch 2.13 torch/distributed/run.py; deepspeed 0.19.8 launcher/runner.py",
)
