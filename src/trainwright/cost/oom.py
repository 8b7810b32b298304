"""Which tensor asked for it? From "Tried to allocate 9.47 GiB" and a plan to the tensors of that size, nearest first.

PyTorch prints the rounded request (two decimals of the unit), so a tensor explains it when its size rounds to the same text or is within the
allocator's rounding; candidates are products of the model's and the plan's own numbers: logits, softmax scores, flat buffers, weights, states.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..errors import SpecError
from ..frameworks import FRAMEWORKS
from ..spec.cluster import ClusterSpec
from ..spec.job import TrainingJob
from ..spec.model import ModelSpec
from ..spec.plan import ParallelPlan
from .ledger.activations import by_kernels, vocabulary
from .ledger.engine import pieces, rank_weights
from .ledger.ranks import slots
from .ledger.saved import saved_by, size
from .ledger.scope import Scope
from .ledger.weights import local_elements
from .table import PlanTable

UNITS = {"B": 1, "BYTES": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SIZE = r"((?<![0-9a-z.+-])[0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([KMGT]?i?B|bytes)\b"  # a number and its unit
WORD = {4: "fp32", 2: "16-bit", 1: "8-bit"}


@dataclass(frozen=True)
class Suspect:
    """A tensor that may have been asked for. `error` is its size relative to the request, minus one; `advice` what makes it smaller."""

    what: str
    formula: str
    bytes: int
    error: float
    when: str
    advice: str


def read_allocation(text: str) -> tuple[int, int]:
    """Bytes of an allocator's complaint, and half a unit of its last digit. Takes ``Tried to allocate 9.47 GiB`` or a bare ``9.47 GiB``.

    Raises `SpecError` when the text names no size.
    """
    found = re.search(r"(?:allocate|allocating|request(?:ed)?)\D{0,40}?" + SIZE, text, re.I) or re.search(SIZE, text, re.I)
    if not found:
        raise SpecError(f"{text[:80]!r} names no size", "allocation", ["Tried to allocate 9.47 GiB"])
    bytes_ = size_of(found[1], found[2])
    decimals = len(found[1].lower().partition("e")[0].partition(".")[2])
    if not 1 <= bytes_ < 2**60:
        raise SpecError(f"{found[0][:40]!r} is no size of a tensor", "allocation", ["Tried to allocate 9.47 GiB"])
    return round(bytes_), max(round(0.5 * 10**-decimals * UNITS[found[2].upper()]), 1)


def size_of(digits: str, unit: str) -> float:
    """Bytes of the two groups of `SIZE`."""
    return float(digits.replace(",", "").replace("_", "")) * UNITS[unit.upper()]


def explain_allocation(
    text: str, model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan, top: int = 5
) -> list[Suspect]:
    """Tensors of the plan by how near their size is to the request, nearest first; those within 2 % before all others."""
    wanted, tolerance = read_allocation(text)
    found: dict[tuple[str, int], Suspect] = {}
    for what, formula, bytes_, when, advice in candidates(model, cluster, job, plan):
        if bytes_ > 0:
            error = 0.0 if abs(bytes_ - wanted) <= tolerance else bytes_ / wanted - 1
            if " tokens x " in formula and abs(error) > 0.005:
                tokens = float(formula.partition(" tokens")[0].replace(",", ""))
                formula += f"; {tokens * wanted / bytes_:,.0f} tokens would be the request"
            found.setdefault((what, round(bytes_)), Suspect(what, formula, round(bytes_), error, when, advice))
    return sorted(found.values(), key=lambda s: (abs(s.error), -s.bytes))[:top]


Candidate = tuple[str, str, float, str, str]


def candidates(model: ModelSpec, cluster: ClusterSpec, job: TrainingJob, plan: ParallelPlan) -> list[Candidate]:
    """(what, formula, bytes, when, advice) of every large tensor that a step of the plan allocates in one piece."""
    scope = Scope(model, cluster, job, plan.structure, PlanTable.from_plans([plan]))
    return [*_logits(scope), *_activations(scope), *_weights(scope), *_flat(scope)]


def one(column: np.ndarray) -> float:
    return float(np.asarray(column).reshape(-1)[0])


def _logits(scope: Scope) -> list[Candidate]:
    tokens, whole = one(scope.tokens), one(vocabulary(scope))
    share = -(-whole // one(scope.tp))
    advice = "chunked or fused loss, vocab-parallel loss under TP, a smaller micro-batch or sequence, context parallelism"
    found: list[Candidate] = []
    kinds = [("logits", whole), ("logits, the rank's share of the vocabulary", share)]
    for name, vocab in kinds[: 1 if share == whole else 2]:
        for each in (4, 2):
            formula = f"{tokens:,.0f} tokens x {vocab:,.0f} vocabulary x {each} bytes"
            found.append((f"{name} in {WORD[each]} (also log-softmax or their gradient)", formula, tokens * vocab * each, "loss", advice))
    return found


def _activations(scope: Scope) -> list[Candidate]:
    found: list[Candidate] = []
    micro = "a smaller micro-batch, recomputation, tensor or context parallelism"
    for block in scope.model.blocks.values():
        for kernels, rows in by_kernels(scope):
            if not rows.any():
                continue
            for s in saved_by(block, kernels):
                advice = "flash attention" if s.layout == "scores" else micro
                label = f"{s.tensor} of {block.name}" if s.layout != "scores" else f"softmax scores of {block.name}"
                found.append((label, f"{s.width:g} x {s.bytes:g} bytes ({s.layout})", one(size(s, scope)), "forward or backward", advice))
    heads, b, s_len = scope.model.heads, one(scope.b), scope.job.seq_len
    for each in (4, 2):
        local = -(-heads // one(scope.tp))
        formula = f"{b:g} x {local:g} heads x {s_len:,} x {s_len:,} x {each} bytes"
        scores = b * local * s_len * s_len * each
        found.append((f"attention scores in {WORD[each]}", formula, scores, "attention", "flash attention, a shorter sequence"))
    hidden = one(scope.tokens) * scope.model.hidden
    for each in (4, 2):
        formula = f"{one(scope.tokens):,.0f} tokens x {scope.model.hidden:,} hidden x {each} bytes"
        found.append((f"hidden states in {WORD[each]}", formula, hidden * each, "forward or backward", micro))
    return found


def _weights(scope: Scope) -> list[Candidate]:
    found: list[Candidate] = []
    advice = "sharding (ZeRO-3, FSDP), tensor parallelism, loading shard by shard"
    blocks = [scope.model.embedding, *scope.model.blocks.values(), scope.model.head]
    for block in blocks:
        for weight in block.weights:
            for elements, name in {one(local_elements(weight, scope)): "its share", float(weight.elements): "whole"}.items():
                for each in (4, 2):
                    formula = f"{elements:,.0f} elements x {each} bytes"
                    what = f"{weight.name} ({name}, {WORD[each]}; the weight, its gradient or a state)"
                    found.append((what, formula, elements * each, "load, backward or step", advice))
    return found


def _flat(scope: Scope) -> list[Candidate]:
    """Buffers of all parameters in one piece: gradients, flat partitions, a whole checkpoint."""
    found: list[Candidate] = []
    framework = FRAMEWORKS[scope.structure.framework].title
    p = pieces(scope)
    held = {float(scope.model.parameters): "of the whole model"}
    for slot in slots(scope):
        held.setdefault(one(rank_weights(p, slot).held.everything), f"of pipeline rank {int(slot.rank[0])}")
    shards = one(scope.data_ranks)
    advice = "ZeRO or FSDP over more ranks, offload, 8-bit or no optimizer states"
    for elements, where in held.items():
        parts = [(f"all parameters {where}", elements)]
        if shards > 1:
            parts.append((f"a 1/{shards:.0f} share of the parameters {where}", elements / shards))
        for name, count in parts:
            for each, what in ((4, "fp32 gradients, masters or one optimizer state"), (2, "16-bit weights or gradients")):
                formula = f"{count:,.0f} elements x {each} bytes"
                label = f"{name} in one flat buffer ({what}; {framework})"
                found.append((label, formula, count * each, "setup, backward or step", advice))
    if scope.structure.framework == "deepspeed":
        found += _buckets(scope)
    return found


def _buckets(scope: Scope) -> list[Candidate]:
    sizes = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "sub_group_size": 1e9}
    return [
        (f"{name} ({WORD[each]})", f"{elements:,.0f} x {each} bytes", elements * each, "backward or step", f"a smaller {name}")
        for name, elements in ((name, scope.option(name, default)) for name, default in sizes.items())
        for each in (4, 2)
    ]
