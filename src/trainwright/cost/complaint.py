"""What an out-of-memory message says beside the request: how full the card was, of what, and whether the plan knew.

PyTorch 2.1 and later (c10/cuda/CUDACachingAllocator.cpp): ``Tried to allocate A. GPU 0 has a total capacity of B of which C is free. Process 1 has D
memory in use. Including non-PyTorch memory, this process has E memory in use. Of the allocated memory F is allocated by PyTorch, and G is reserved by
PyTorch but unallocated.`` Before: ``Tried to allocate A (GPU 0; B total capacity; F already allocated; C free; F + G reserved in total by PyTorch)``.
Of a node's RAM the kernel tells the process that it kills nothing: its launcher reports exit code -9 (a container 137), PyTorch's allocator a size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..units import GIB, format_bytes
from .memory_table import PHASES
from .oom import SIZE, read_allocation, size_of

HOST = r"exit ?code\W{0,3}(?:-9|137)\b|\bSIGKILL\b|signal 9\b|\bKilled\b|oom-?kill|bad_alloc|DefaultCPUAllocator|Cannot allocate memory"
OTHER_CARD = 0.08  # relative: what driver and firmware take of a card is less
LONGEST = 4_000  # characters of a line that are looked at; PyTorch's longest message has 700
MORE = 0.03  # relative: what the memory of a plan may be off


@dataclass(frozen=True)
class Complaint:
    """Bytes; None where the message does not say. `unallocated`: freed blocks that the allocator keeps. `others`: of other processes on the card.
    `host`: it is about the node's RAM."""

    request: int | None
    capacity: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    others: int
    host: bool = False


def first_complaint(log: str) -> str:
    """The first line of a log that says that memory ran out, which the others follow from; the text itself where no line does."""
    pattern = rf"(?:out of memory|tried to allocate).*{SIZE}|{HOST}"
    lines = (line[:LONGEST] for line in log.splitlines())
    return next((line for line in lines if re.search(pattern, line, re.I)), log[:LONGEST])


def read_complaint(text: str) -> Complaint:
    """Raises `SpecError` where the text names no size, and no process that was killed."""

    def said(*patterns: str) -> int | None:
        found = next((m for p in patterns if (m := re.search(p.replace("SIZE", SIZE), text, re.I))), None)
        return None if found is None else round(size_of(found[1], found[2]))

    host = re.search(HOST, text, re.I) is not None
    allocated = said("SIZE is allocated by PyTorch", "SIZE already allocated")
    unallocated, reserved = said("SIZE is reserved by PyTorch but unallocated"), said("SIZE reserved in total by PyTorch")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(reserved - allocated, 0)
    processes = [round(size_of(*sizes)) for sizes in re.findall(r"Process \d+ has " + SIZE + " memory in use", text, re.I)]
    if processes and not re.search("this process has", text, re.I):
        processes.remove(max(processes))  # in a container a process does not know its own number
    return Complaint(
        request=None if host and not re.search(SIZE, text, re.I) else read_allocation(text)[0],
        capacity=said("total capac[a-z]* of SIZE", "SIZE total capacity"),
        free=said("of which SIZE is free", "SIZE free"),
        allocated=allocated,
        unallocated=unallocated,
        others=sum(processes),
        host=host,
    )


def conclusions(complaint: Complaint, memory: Mapping[str, Any], host_memory: float | None = None) -> Iterator[str]:
    """Sentences; `memory` is what the plan needs (`Estimate.memory_dict`), `host_memory` what a node has, where that is known."""
    if complaint.host:
        yield from _host(memory, host_memory)
        return
    capacity = memory["capacity_bytes"]
    if complaint.capacity is not None and abs(complaint.capacity / capacity - 1) > OTHER_CARD:
        here, planned = format_bytes(complaint.capacity), format_bytes(capacity)
        yield f"The card of the message has {here}, the plan's has {planned}: not the GPU of the plan, or a part of one."
    if complaint.others >= GIB / 2:
        yield f"Other processes hold {format_bytes(complaint.others)} of the card (nvidia-smi names them)."
    yield from _room(complaint)
    if complaint.allocated is not None and complaint.request is not None:
        yield from _foretold(complaint.allocated + complaint.request, complaint.capacity or capacity, memory)


def _host(memory: Mapping[str, Any], have: float | None) -> Iterator[str]:
    phases = ", ".join(f"{name} {format_bytes(value)}" for name, value in memory["host_phases"].items())
    yield f"The operating system refuses or kills where a node's RAM is used up. The plan takes a node {phases}."
    need = memory["host_bytes_per_node"]
    if have is None:
        yield "How much a node has is not said (cluster.host_memory_gb)."
    elif need > have:
        yield f"A node has {format_bytes(have)}: {format_bytes(need - have)} are missing."
    else:
        yield f"A node has {format_bytes(have)}, which is enough for the plan: something else was there, or a limit below it (cgroup, Slurm's --mem)."


def _room(complaint: Complaint) -> Iterator[str]:
    """Whether the allocator's own freed blocks would have done."""
    show, freed, free, request = format_bytes, complaint.unallocated, complaint.free, complaint.request
    if freed is None or free is None or request is None:
        return
    if request <= free:
        yield f"{show(free)} were free: the limit was not the card's (a memory fraction set for the process, or another that has given up its part since)."
    elif request <= freed + free:
        yield (
            f"{show(freed)} lay in freed blocks, {show(free)} were free: enough together, but in pieces. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them."
        )
    else:
        blocks = f" and freed blocks ({show(freed)})" if freed else ""
        yield f"Free memory ({show(free)}){blocks}: {show(request - freed - free)} too little for the request."


def _foretold(reached: int, capacity: int, memory: Mapping[str, Any]) -> Iterator[str]:
    """What the run would have held in tensors beside what the plan says."""
    show, framework, device = format_bytes, memory["breakdown"].get("framework", 0), memory["device_bytes"]
    peak = memory["peak_bytes"] - framework
    if reached > peak * (1 + MORE):
        yield (
            f"With the request the run would hold {show(reached)} in tensors, {show(reached - peak)} more than the plan's peak of {show(peak)}: something is "
            "there that the plan does not say (longer sequences, a larger micro-batch, a second model, an evaluation, outputs kept from step to step)."
        )
        return
    ahead = next((name for name in PHASES if memory["phases"].get(name, 0) >= reached * (1 - MORE)), None)
    where = f", which {ahead} reaches" if ahead else ""
    yield f"With the request the run would hold {show(reached)} in tensors{where}; the plan's peak is {show(peak)}, {show(device)} on the device."
    if device > capacity:
        yield f"So the plan does not fit on this card: {show(device - capacity)} are missing."
