"""A layout: the numbers that a search varies by the million, and the choices that give a plan its structure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Structure:
    """The choices of a layout that are no numbers. Equations loop over the few structures of a table, never over its rows."""

    framework: str = "fsdp2"
    framework_date: str | None = None
    sharding: str = "zero3"
    sequence_parallel: bool = False
    cp_kind: str = "ring"
    async_tp: bool = False
    cuda_graphs: bool = False
    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_every: int = 1
    recompute_modules: tuple[str, ...] = ()
    attention: str = "flash"
    offload: str = "none"
    reshard_root: bool = True
    reserved_gb: float = 0.0
    fp8_params: bool = False
    compile: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ParallelPlan:
    """One row: a structure and its numbers. `accumulation` is the number of micro-batches that a replica runs a step."""

    structure: Structure
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual_stages: int = 1
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        """In a few words: ``pp 4 (1f1b), tp 8, dp 2, zero1, micro-batch 1``."""
        s = self.structure
        parts = [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "ep", "etp") if getattr(self, name) > 1]
        if self.pp > 1:
            virtual = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
            parts.insert(0, f"pp {self.pp}{virtual} ({s.schedule})")
        two_levels = self.dp_replicate > 1 and self.dp_shard > 1
        parts.append(f"dp {self.dp_replicate} x {self.dp_shard}" if two_levels else f"dp {self.dp}")
        parts.append(s.sharding if s.sharding != "none" else "no sharding")
        parts.append(f"micro-batch {self.micro_batch_size}")
        if s.recompute != "none":
            parts.append(f"{s.recompute} recompute")
        if s.offload != "none":
            parts.append(f"offload {s.offload}")
        return ", ".join(parts)


NUMBERS = tuple(f.name for f in fields(ParallelPlan) if f.name != "structure")
