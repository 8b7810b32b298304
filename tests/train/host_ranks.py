"""What `measure_host` measures, on the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainwright.train import measure_host as host
from trainwright.train.tracker import Tracker


def sent() -> dict[str, tuple[int, int]]:
    """What is measured -> (messages that its seconds are divided by, messages that it sends)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    works = {kind: host.pair(kind, 1, 64, mesh) for kind in ("split", "sequence")}
    works |= {kind: host.attended(kind, 1, mesh) for kind in ("ring", "allgather", "ulysses")}
    found = {}
    for kind, work in works.items():
        with Tracker() as seen:
            work()
        found[kind] = host.messages(kind, mesh.size()), sum(count for count, _ in seen.messages.values())
    return found


def pairs() -> float:
    """The largest difference between what a split pair makes and what a plain one of the same numbers makes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worst = 0.0
    for kind in ("split", "sequence"):
        torch.manual_seed(0)
        module = host.Pair(2, mesh.size())
        x = torch.randn(1, 8, host.HIDDEN)
        whole = module(x)
        host.split(module, kind, mesh)
        mine = x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if kind == "sequence" else x
        wanted = whole.chunk(mesh.size(), 1)[mesh.get_local_rank()] if kind == "sequence" else whole
        worst = max(worst, float((module(mine) - wanted).abs().max()))
    return worst


def measured() -> dict[str, Any]:
    """A single round of small sizes."""
    host.ROUNDS, host.ROWS, host.TOKENS, host.SEQUENCES = 1, (8, 32), (64, 256), (1, 2)
    return host.measure(dist.get_world_size())
