"""What a rank owns through a step: parameters and the groups that FSDP2 gathers, and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec.blocks import Block, Weight
from ...spec.optimizer import OPTIMIZERS
from .fsdp import Fsdp, Group, shrink
from .machine import PART, Parameter, Run, Storage, Tape, Tensor
from .setup import Setup, reduces_every_micro_batch
from .sizes import Size, Symbols, times

ENDS_BEFORE, ENDS_AFTER = -1, 1 << 20
TABLE_COPY = "copy of the tied table"


class Owned:
    """Owns the tape and everything that lives through a step. `layers` are the blocks to replay, first to last."""

    def __init__(self, setup: Setup, layers: list[Block], named: bool = False) -> None:
        self.setup, self.layers = setup, layers
        v = setup.variant
        self.symbols = Symbols(tensor_parallel=v.tensor, sequence_parallel=setup.structure.sequence_parallel)
        self.tape = Tape(named)
        self.run = Run(self.tape)
        self.owned: list[Storage] = []
        self.fsdp: Fsdp | None = None
        if setup.fsdp:
            self.fsdp = Fsdp(
                self.run,
                self.symbols,
                compute=setup.types.read,
                stored=setup.types.stored,
                reduce=setup.types.reduced,
                sharded=setup.sharded,
                reduce_each=reduces_every_micro_batch(setup.structure),
                uses_each=setup.job.optimizer_in_backward,
            )
        self.root: dict[str, Parameter] = {}
        self.layer_params: list[dict[str, Parameter]] = []
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        # what the pipeline runtime's last calls still hold while it reduces: a stage's output, and its input with the gradient that is sent back
        self.stage_output: Tensor | None = None
        self.stage_input: Parameter | None = None
        self._make_parameters()

    def _make_parameters(self) -> None:
        stage = self.setup.stage
        ends = ([self.setup.model.embedding] if stage.first else []) + ([self.setup.model.head] if stage.last else [])
        self.root = {}
        for block in ends:
            self.root |= self._parameters(block, ENDS_BEFORE)
        if self.setup.copies_table:
            self.root[TABLE_COPY] = self._parameter(
                TABLE_COPY, self.setup.model.embedding.ops[0].weights[0], not self.setup.lora, ENDS_BEFORE
            )
        self.layer_params = [self._parameters(block, i) for i, block in enumerate(self.layers)]
        self.root_group = self._own("root", ENDS_BEFORE, self.root)
        self.layer_groups: list[Group | None] = []
        self.layer_owned: list[NDArray[np.int64]] = []
        for i, params in enumerate(self.layer_params):
            before = self.tape.live.copy()
            self.layer_groups.append(self._own("layer", i, params))
            self.layer_owned.append(self.tape.since(before))
        if self.setup.structure.sharding == "zero1":
            size = self.symbols.zero_redundancy(OPTIMIZERS[self.setup.job.optimizer], self._all_trained(), self.setup.types.stepped)
            self.owned.append(Storage(self.tape, size, PART["optimizer"], "optimizer states of rank 0"))
        buffers = self.setup.model.buffer_bytes
        if buffers:
            self.owned.append(Storage(self.tape, self.symbols.one(buffers), PART["parameters"], "buffers"))

    def _all_trained(self) -> list[Weight]:
        """Every trained tensor of the stage in order, not only those of the layers that are replayed."""
        model, stage = self.setup.model, self.setup.stage
        blocks = [model.embedding] * stage.first + [model.blocks[name] for name in stage.layers] + [model.head] * stage.last
        copy = model.embedding.ops[0].weights[:1] if self.setup.copies_table and not self.setup.lora else ()
        return [*(w for block in blocks for w, trained in self.setup.owned(block) if trained), *copy]

    def _parameters(self, block: Block, layer: int) -> dict[str, Parameter]:
        return {w.name: self._parameter(w.name, w, trained, layer) for w, trained in self.setup.owned(block)}

    def _parameter(self, name: str, w: Any, trained: bool, layer: int) -> Parameter:
        p = Parameter(name, self.symbols.local(w), self.setup.types.read, trained, w)
        p.layer = layer
        tables = [op.weights[0] for op in self.setup.model.embedding if op.kind == "embedding"] if self.setup.stage.first else []
        if name == TABLE_COPY or (self.setup.model.tied and self.setup.stage.last and not self.setup.copies_table):
            tables = tables[1:]  # what the head's product makes, alone or added to the look-up's, is laid out as the table is
        if layer < 0 and self.symbols.splits(w) is not None and any(w is x for x in tables):
            p.grad_elements = self.symbols.one(w.elements)
        return p

    def _own(self, name: str, layer: int, params: dict[str, Parameter]) -> Group | None:
        """Owned bytes of a group of parameters: themselves, optimizer states, DDP's gradient buckets."""
        s, setup = self.symbols, self.setup
        weights = [p.weight for p in params.values()]
        trained = [p.weight for p in params.values() if p.trained]
        if not weights:
            return None
        count = s.shard if setup.sharded else _local(s)
        tape = self.tape
        self.owned.append(Storage(tape, times(count(weights), setup.types.stored), PART["parameters"], f"{name} parameters"))
        if setup.types.masters and trained:
            self.owned.append(Storage(tape, count(trained, 4), PART["master_weights"], f"{name} masters"))
        if not trained:
            return self._group(name, layer, params)
        if setup.ddp and setup.variant.data:
            self.owned.append(Storage(tape, count(trained, setup.types.stored), PART["gradients"], f"{name} gradient buckets"))
        if setup.structure.sharding != "zero1":
            size = s.optimizer(OPTIMIZERS[setup.job.optimizer], trained, setup.types.stepped, setup.sharded, layer >= 0)
            self.owned.append(Storage(tape, size, PART["optimizer"], f"{name} optimizer states"))
        return self._group(name, layer, params)

    def _group(self, name: str, layer: int, params: dict[str, Parameter]) -> Group | None:
        if self.fsdp is None:
            return None
        zero3 = self.setup.structure.sharding == "zero3"
        reshard = zero3 and (layer >= 0 or self.setup.structure.reshard_root)
        group = Group(self.fsdp, name, layer, list(params.values()), reshard=reshard)
        self.fsdp.groups.append(group)
        return group

    def parameters(self) -> list[Parameter]:
        return [*self.root.values(), *(p for params in self.layer_params for p in params.values())]

    def _hook_gradients(self) -> None:
        """DDP copies a finished gradient into its bucket; an optimizer in backward uses it and frees it; others are added to the kept
        one."""
        setup = self.setup
        for p in self.parameters():
            if setup.job.optimizer_in_backward and self.fsdp is None:
                p.on_grad = _forget
            elif self._buckets:
                p.on_grad = self._to_bucket
            elif self.fsdp is None or not self.fsdp.reduce_cast:
                p.on_grad = self._shrink

    @property
    def _buckets(self) -> bool:
        return self.setup.ddp and self.setup.variant.data

    def _to_bucket(self, p: Parameter) -> None:
        """The last micro-batch's gradient goes into its bucket and what it was added to is free; in one between first and last that stays."""
        p.grad = None
        if p.accumulated is not None:
            p.accumulated.become(self.symbols.when(p.accumulated.size, "three micro-batches"))

    def _shrink(self, p: Parameter) -> None:
        shrink(self.symbols, p)


def _local(s: Symbols) -> Callable[..., Size]:
    return lambda ws, factor=1: tuple(item for w in ws for item in s.local(w, factor))


def _forget(p: Parameter) -> None:
    p.grad = p.accumulated = None
