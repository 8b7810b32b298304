"""A model as a list of (block, count)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .blocks import Block, Op


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """What a Hugging Face ``config.json`` says, as blocks. Built by a family of `trainwright.models`; never changed afterwards.

    * `layers` names the block of each layer, first to last (a dense-first mixture of experts has two names, a hybrid model as well).
    * `embedding` runs on the first pipeline stage; `head` (final norm, output projection, loss) on the last.
    * `tied`: the output projection reuses the embedding table, so `head` owns no such weight (on another pipeline rank it is a copy).
    * `mtp` are multi-token-prediction layers: trained with the model, counted apart.
    """

    name: str
    family: str
    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    tied: bool
    blocks: Mapping[str, Block]
    layers: tuple[str, ...]
    embedding: Block
    head: Block
    mtp: tuple[Block, ...] = ()
    buffer_bytes: int = 0  # non-trainable buffers (rotary frequencies), bytes
    router_bias_elements: int = 0  # buffers of the routers that published totals sometimes count
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def counts(self) -> tuple[tuple[Block, int], ...]:
        """(block, how many layers of it), in order of first appearance."""
        return tuple((self.blocks[name], n) for name, n in Counter(self.layers).items())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def parameters(self) -> int:
        """Every trainable element once (a tied head is not counted twice), multi-token prediction left out."""
        return self.embedding.parameters + self.head.parameters + sum(b.parameters * n for b, n in self.counts)

    @cached_property
    def active_parameters(self) -> int:
        """What one token passes through, embedding and head included."""
        ends = self.embedding.active_parameters + self.head.active_parameters
        return ends + sum(b.active_parameters * n for b, n in self.counts)

    @cached_property
    def mtp_parameters(self) -> int:
        return sum(b.parameters for b in self.mtp)

    @cached_property
    def attention_ops(self) -> tuple[Op, ...]:
        return tuple(op for block, _ in self.counts for op in block.rows("attention"))

    @property
    def heads(self) -> int:
        return max((op.heads for op in self.attention_ops), default=1)

    @property
    def kv_heads(self) -> int:
        return min((op.kv_heads for op in self.attention_ops), default=1)

    @property
    def head_dim(self) -> int:
        return max((op.head_dim for op in self.attention_ops), default=0)

    @property
    def experts(self) -> int:
        return max((op.experts for block, _ in self.counts for op in block.ops), default=0)

    @property
    def top_k(self) -> int:
        return max((op.top_k for block, _ in self.counts for op in block.ops), default=0)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0
