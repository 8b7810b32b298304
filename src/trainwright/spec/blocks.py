"""A block as a table: rows of operations with named dimensions. Parameters, FLOPs, shards and activations are sums over its rows.

Units are *per token*: `Op.width` is the number of elements that the operation's output has for one token. What is not per token (attention
scores, the softmax over a sequence) follows from the heads and the sequence length.

Tensor parallelism knows two regions (Korthikanti et al., arXiv:2205.05198, figure 5):

* ``tensor``   between a column-parallel and a row-parallel product: width / tp elements for every token
* ``sequence`` everywhere else: the whole width, for tokens / tp of the tokens with sequence parallelism, for all of them without
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

Kind = Literal[
    "embedding",  # a row of the table for each token: inputs () -> hidden
    "norm",  # function: rms | layer | layer-no-weight; heads > 0: applied to each head of head_dim
    "linear",  # y = x W^T (+ b): k inputs, width outputs
    "grouped_linear",  # one product an expert over the tokens routed to it (top_k of experts); width and k of one expert
    "rope",  # rotary embedding of q and k (inputs q, k; in place of both)
    "attention",  # softmax(q k^T) v: heads, kv_heads, head_dim, v_head_dim, window
    "linear_attention",  # gated delta rule and relatives: state of head_dim x v_head_dim a head
    "conv1d",  # short causal depthwise convolution; k = kernel size
    "activation",  # function: silu | gelu | gelu-tanh | relu | relu2 | xielu | sigmoid | softmax
    "multiply",  # elementwise product of two tensors
    "add",  # residual sum
    "router",  # scores of the experts and the choice of top_k: k = hidden, width = experts
    "dispatch",  # tokens to their experts: width = hidden, top_k copies a token
    "combine",  # weighted sum of the top_k outputs
    "cross_entropy",  # logits -> loss: width = vocabulary
]
Region = Literal["tensor", "sequence"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter tensor as PyTorch stores it.

    `shape` is whole; `tp_dim` is the dimension that tensor parallelism (inside an expert: `etp`) splits, None = replicated; `ep_dim` the one
    that expert parallelism splits. `tp_needs_sp`: split only with sequence parallelism (GPT's position table). `frozen_at`: never trained.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    ep_dim: int | None = None
    tp_needs_sp: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Op:
    """One row. `inputs` and `output` are names of tensors of the block; ``x`` is what enters, the last row's output what leaves."""

    kind: Kind
    name: str
    inputs: tuple[str, ...]
    output: str
    width: int
    region: Region
    weights: tuple[Weight, ...] = ()
    k: int = 0
    function: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None  # tokens that a query may look back at, None = all
    experts: int = 0
    top_k: int = 0

    @property
    def parallel(self) -> Literal["column", "row", "replicated"]:
        """How tensor parallelism splits a product: by its outputs, by what it sums over, or not at all."""
        main = next((w for w in self.weights if len(w.shape) >= 2), None)
        if main is None or main.tp_dim is None:
            return "replicated"
        return "column" if main.tp_dim == len(main.shape) - 2 else "row"

    @property
    def parameters(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def active_parameters(self) -> int:
        """What one token passes through: top_k of the experts' share of an expert product."""
        if self.kind == "grouped_linear" and self.experts:
            return sum(w.elements * self.top_k // self.experts if w.ep_dim is not None else w.elements for w in self.weights)
        return self.parameters


@dataclass(frozen=True)
class Block:
    """A named list of rows. A transformer layer, an embedding, a head with its loss."""

    name: str
    ops: tuple[Op, ...]
    tags: frozenset[str] = field(default_factory=frozenset)  # e.g. {"moe"}, {"dense"}, {"sliding"}

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(w for op in self.ops for w in op.weights)

    @cached_property
    def parameters(self) -> int:
        return sum(op.parameters for op in self.ops)

    @cached_property
    def active_parameters(self) -> int:
        return sum(op.active_parameters for op in self.ops)

    def rows(self, *kinds: Kind) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.kind in kinds)
