"""What a replay is made for: one structure of one model and job, in the variant that the numbers of a plan pick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...frameworks import FRAMEWORKS
from ...frameworks.dtypes import Dtypes, dtypes
from ...spec.blocks import Block, Op, Weight
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure


class Variant(NamedTuple):
    """What of a plan's numbers changes the order of events, not only sizes."""

    tensor: bool = False  # tp > 1
    data: bool = False  # more than one rank of data parallelism, where nothing is sharded
    batched: bool = False  # more than one sequence a micro-batch, where attention is eager
    single_kv: bool = False  # one key-value head a rank, where heads are repeated: a view
    context: int = 1  # ranks of context parallelism, as far as their steps differ


def reduces_every_micro_batch(structure: Structure) -> bool:
    """FSDP2 with the option ``no_sync = false``: gradients are reduce-scattered after each micro-batch and only their shards are kept."""
    sharded = structure.framework == "fsdp2" and structure.sharding in ("zero2", "zero3")
    return sharded and dict(structure.options).get("no_sync") is False


@dataclass(frozen=True)
class Stage:
    """The part of a model on one pipeline rank: kinds of its layers, whether embedding and head stand here."""

    layers: tuple[str, ...]
    first: bool = True
    last: bool = True
    piped: bool = False


@dataclass(frozen=True, eq=False)
class Setup:
    """Resolved choices of a replay."""

    model: ModelSpec
    job: TrainingJob
    structure: Structure
    variant: Variant
    stage: Stage

    @cached_property
    def types(self) -> Dtypes:
        return dtypes(FRAMEWORKS[self.structure.framework], self.job, self.structure, alone=not self.variant.data)

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 wraps the model: any sharding, and replication over more than one rank (``replicate()``)."""
        return self.structure.framework == "fsdp2" and (self.structure.sharding != "none" or self.variant.data)

    @property
    def sharded(self) -> bool:
        return self.structure.sharding in ("zero2", "zero3")

    @property
    def copies_table(self) -> bool:
        """Whether a tied head has a table of its own: pipeline stages are modules of their own, also where both ends stand on one rank."""
        return self.model.tied and self.stage.last and self.stage.piped

    @property
    def ddp(self) -> bool:
        return self.structure.framework == "ddp"

    @property
    def lora(self) -> bool:
        return self.job.method != "full"

    @property
    def targets(self) -> frozenset[str]:
        return frozenset(self.job.lora_targets or ("q_proj", "v_proj"))

    def adapters(self, op: Op) -> tuple[Weight, ...]:
        """LoRA's two matrices beside a product, A (rank x inputs) and B (outputs x rank)."""
        if not self.lora or op.kind != "linear" or op.name not in self.targets:
            return ()
        main = op.weights[0]
        a = Weight(f"{main.name}.lora_A", (self.job.lora_rank, op.k), 1 if op.parallel == "row" else None)
        b = Weight(f"{main.name}.lora_B", (op.width, self.job.lora_rank), 0 if op.parallel == "column" else None)
        return (a, b)

    def owned(self, block: Block) -> Iterator[tuple[Weight, bool]]:
        """(tensor, trained) of a block in order, adapters after their product."""
        for op in block:
            for w in op.weights:
                yield w, not self.lora
            for w in self.adapters(op):
                yield w, True

    @property
    def head_weights(self) -> tuple[Weight, ...]:
        """The output projection: its own tensor, or the embedding's where tied."""
        return self.model.head.weights
