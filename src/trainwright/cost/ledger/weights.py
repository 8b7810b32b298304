"""How many elements of each block's weights a rank holds: tensor, expert and vocabulary splits, padding, adapters, quantized bases."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from ...spec.blocks import Block, Op, Weight
from ...spec.optimizer import OPTIMIZERS, Optimizer
from ..parameters import greedy_partition
from ..table import Column
from .ranks import Slot
from .saved import Kernels, targeted
from .scope import Scope, ceil_div

# Bits an element of a quantized base, scales included.
# nf4: 4 + 32/64 bits of absmax, double-quantized to 8/64 + 32/(64 x 256) (arXiv:2305.14314, section 3: 0.127 bits); without double
# quantization 4.5.
# int4 (GPTQ, AWQ): groups of 128 with an fp16 scale and a 4-bit zero. int8 (LLM.int8): a row has one fp32 scale.
BASE_BITS = {"nf4": 4.127, "int4": 4 + 20 / 128, "int8": 8.0}


@dataclass(frozen=True)
class Held:
    """Elements on one rank, as columns. `trained` dense / expert weights have gradients and states; `frozen` and `quantized` have none.

    `matrices` counts elements of trained tensors with two dimensions or more, `factors` the rows + columns of those, `products` elements of
    linear weights that are not quantized, `tensors` the trained tensors.
    """

    trained: Column
    trained_expert: Column
    frozen: Column
    quantized: Column
    matrices: Column
    factors: Column
    products: Column
    tensors: Column

    def __add__(self, other: Held) -> Held:
        return Held(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def scaled(self, count: Column | float) -> Held:
        return Held(**{f.name: getattr(self, f.name) * count for f in fields(self)})

    def take(self, rows: object) -> Held:
        return Held(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def all_trained(self) -> Column:
        return self.trained + self.trained_expert

    @property
    def everything(self) -> Column:
        """Elements of every weight, quantized or not, adapters included."""
        return self.trained + self.trained_expert + self.frozen + self.quantized


def nothing(n: int) -> Held:
    return Held(**{f.name: np.zeros(n) for f in fields(Held)})


def local_elements(weight: Weight, scope: Scope) -> Column:
    """Elements of a rank's part: each split dimension is rounded up, the vocabulary to the framework's multiple first."""
    n = len(scope)
    elements = np.full(n, float(weight.elements))
    kv_rows = scope.model.kv_heads * scope.model.head_dim
    for dim, parts in _splits(weight, scope):
        whole = float(weight.shape[dim])
        padded: Column | float = whole
        if dim == 0 and scope.framework.replicates_kv_heads and weight.shape[0] == kv_rows < scope.model.heads * scope.model.head_dim:
            parts = np.minimum(parts, float(scope.model.kv_heads))  # more ranks than key-value heads: each head is held several times
        multiple = scope.framework.pad_vocab_multiple
        if dim == 0 and weight.ep_dim is None and weight.shape[0] == scope.model.vocab and multiple > 1:
            padded = ceil_div(whole, multiple * parts) * multiple * parts
        elements = elements / whole * ceil_div(padded, parts)
    return np.rint(elements)


def _splits(weight: Weight, scope: Scope) -> list[tuple[int, Column]]:
    found = []
    if weight.ep_dim is not None:
        found.append((weight.ep_dim, scope.ep))
    if weight.tp_dim is not None and (scope.structure.sequence_parallel or not weight.tp_needs_sp):
        found.append((weight.tp_dim, scope.etp if weight.ep_dim is not None else scope.tp))
    return found


def held(block: Block, scope: Scope, kernels: Kernels, *, ends: bool = False) -> Held:
    """The weights of one block on one rank. `ends`: embedding or head, which no base quantization touches."""
    n = len(scope)
    columns = {f.name: np.zeros(n) for f in fields(Held)}
    method = scope.job.method
    for op in block.ops:
        for weight in op.weights:
            elements = local_elements(weight, scope)
            matrix = len(weight.shape) >= 2
            product = op.kind in ("linear", "grouped_linear") and matrix
            if product and (method != "qlora" or ends):
                columns["products"] += elements
            if method == "full":
                columns["trained_expert" if weight.ep_dim is not None else "trained"] += elements
                columns["tensors"] += 1
                if matrix and not ends:
                    columns["matrices"] += elements
                if matrix:
                    columns["factors"] += elements / weight.shape[-1] + elements / weight.shape[-2]
            elif method == "qlora" and product and not ends:
                columns["quantized"] += elements
            else:
                columns["frozen"] += elements
        if method != "full" and targeted(op, kernels):
            adapter = adapter_elements(op, scope)
            columns["trained_expert" if op.kind == "grouped_linear" else "trained"] += adapter
            columns["matrices"] += adapter
            columns["tensors"] += 2
    return Held(**columns)


def adapter_elements(op: Op, scope: Scope) -> Column:
    """A (rank x inputs) and B (outputs x rank) of a LoRA pair (arXiv:2106.09685); the side that tensor parallelism splits is split here
    too.
    """
    a, b = _factors(op, scope)
    return a + b


def _factors(op: Op, scope: Scope) -> tuple[Column, Column]:
    """Elements of an adapter's A and B on this rank."""
    parts = scope.etp if op.kind == "grouped_linear" else scope.tp
    one = np.ones(len(scope))
    inputs = ceil_div(op.k * one, parts) if op.parallel == "row" else op.k * one
    outputs = ceil_div(op.width * one, parts) if op.parallel == "column" else op.width * one
    copies = ceil_div(float(op.experts), scope.ep) if op.kind == "grouped_linear" and op.experts else one
    return scope.job.lora_rank * inputs * copies, scope.job.lora_rank * outputs * copies


def table_copies(scope: Scope, slot: Slot) -> Column:
    """Tables that a tied head holds beside the embedding's: one on a rank without the embedding; in PyTorch, whose stages are modules of their own, wherever
    there is a pipeline."""
    apart = (scope.pp > 1) & (scope.structure.framework in ("fsdp2", "fsdp1", "ddp"))
    return slot.head * np.where(apart, 1.0, 1.0 - slot.embedding)


def dealt(scope: Scope, slot: Slot) -> Column:
    """Trained elements of the tensors that ZeroRedundancyOptimizer gives rank 0: whole tensors, as tensor parallelism leaves them, dealt over the ranks."""
    model = scope.model
    copied = table_copies(scope, slot) * model.tied
    counts = [
        *((model.blocks[name], count) for name, count in slot.layers.items()),
        (model.embedding, slot.embedding + copied),
        (model.head, slot.head),
    ]
    tensors = [(size, count) for block, count in counts for size in _trained_tensors(block, scope)]
    columns = np.array([scope.shards, *(column for pair in tensors for column in np.broadcast_arrays(*pair))])
    kinds, where = np.unique(columns, axis=1, return_inverse=True)
    return np.array([_first_share(tuple(kind)) for kind in kinds.T.tolist()])[where.reshape(-1)]


def _trained_tensors(block: Block, scope: Scope) -> list[Column]:
    if scope.job.method == "full":
        return [local_elements(w, scope) for w in block.weights]
    adapted = [op for op in block.rows("linear", "grouped_linear") if op.name in scope.job.lora_targets]
    return [size for op in adapted for size in _factors(op, scope)]


@lru_cache(maxsize=4096)
def _first_share(kind: tuple[float, ...]) -> float:
    """(ranks, then the elements of each kind of tensor and how many of it there are) -> elements of the first rank."""
    ranks, *pairs = kind
    sizes = [int(size) for size, count in zip(pairs[::2], pairs[1::2]) for _ in range(int(count))]
    return float(sum(sizes[i] for i in greedy_partition(sizes, int(ranks))[0]))


def largest_weight(blocks: list[Block], scope: Scope) -> Column:
    """Elements of the largest single tensor on a rank."""
    found = np.zeros(len(scope))
    for block in blocks:
        for weight in block.weights:
            found = np.maximum(found, local_elements(weight, scope))
    return found


def quantized_bytes(elements: Column, scope: Scope) -> Column:
    """Bytes of a quantized base. Option ``bnb_4bit_use_double_quant = false`` leaves nf4's absmax in fp32: 4.5 bits."""
    kind = scope.job.base_quantization or "nf4"
    bits = BASE_BITS.get(kind, 4.5)
    if kind == "nf4" and not scope.switch("bnb_4bit_use_double_quant", True):
        bits = 4.5
    return elements * bits / 8


def state_bytes(optimizer: Optimizer, elements: Column, share: Held, stored: Column | float) -> Column:
    """Bytes of the optimizer's states for `elements` of a rank's trained elements (`share` says what they are made of); `stored` bytes a
    state element.
    """
    if optimizer.pageable:
        return elements * 0.0  # unified memory of the driver: moved to the host under pressure, never in PyTorch's pools
    whole = np.maximum(share.all_trained, 1.0)
    part = elements / whole
    if optimizer.factored:
        vectors = whole - np.minimum(share.matrices, whole)
        return np.rint(part * (share.factors * 4 + vectors * 4 + share.tensors * optimizer.step_bytes))
    if optimizer.bytes_per_element is not None:
        scales = 4 / optimizer.block if optimizer.block else 0.0
        return np.rint(elements * optimizer.copies * (optimizer.bytes_per_element + scales))
    copies = optimizer.copies * elements
    if optimizer.matrix_copies is not None:
        matrices = np.minimum(share.matrices, whole) * part
        copies = optimizer.matrix_copies * matrices + optimizer.copies * (elements - matrices)
    return copies * stored


def optimizer_of(scope: Scope) -> Optimizer:
    return OPTIMIZERS[scope.job.optimizer]
