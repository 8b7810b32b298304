"""A model built from the planner's block tables: one module an operation, run in the table's order, so that what is planned is what is trained.

A block's rows name their inputs and outputs; `Table` runs them over a dictionary of tensors and forgets each tensor after its last use, so that
what lives on is what autograd saved. Parameters have the table's names (``layers.0.self_attn.q_proj.weight``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import SpecError
from ..spec.blocks import Block, Op
from ..spec.model import ModelSpec
from .config import Numbers, numbers_of
from .kernels import documents_mask
from .losses import HeadLoss
from .modules import ACTIVATIONS, Context, Core, Experts, LayerNorm, RMSNorm, Router, rotate
from .reduce import Turn

INITIAL_STD = 0.02


class Table(nn.Module):
    """One block. `enter(name, op, x)`: what tensor parallelism does to an input before a split product."""

    def __init__(self, block: Block, numbers: Numbers, attention: str, **made: Any) -> None:
        super().__init__()
        self.block, self.numbers = block, numbers
        self.ops = [op for op in block.ops if op.kind != "cross_entropy"]
        routed = [op for op in block.ops if op.kind == "grouped_linear"]
        within = _within_experts(block) if routed else {}
        self.within = {op.name for op in within.values()}
        self.paths: dict[str, str] = {}
        for op in self.ops:
            if op.name not in self.within:
                self._add(op, attention, made)
        if routed:
            self._put(routed[0].weights[0].name.removesuffix(f".{routed[0].name}.weight"), Experts(within, numbers, **made), "experts")
        self.enter: Callable[[str, Op, torch.Tensor], torch.Tensor] | None = None
        self.last = {name: i for i, op in enumerate(self.ops) if op.name not in self.within for name in op.inputs}

    def _put(self, path: str, module: nn.Module, name: str) -> None:
        where: nn.Module = self
        *parents, leaf = path.split(".")
        for part in parents:
            if not hasattr(where, part):
                setattr(where, part, nn.Module())
            where = getattr(where, part)
        setattr(where, leaf, module)
        self.paths[name] = path

    def _add(self, op: Op, attention: str, made: dict[str, Any]) -> None:
        eps = self.numbers.eps
        match op.kind:
            case "embedding":
                w = op.weights[0]
                self._put(w.name.removesuffix(".weight"), nn.Embedding(*w.shape, **made), op.name)
            case "norm":
                width = op.head_dim if op.heads else op.width
                if op.function == "rms":
                    module: nn.Module = RMSNorm(width, eps, **made)
                else:
                    bias = any(w.name.endswith(".bias") for w in op.weights)
                    module = LayerNorm(width, eps, elementwise_affine=bool(op.weights), bias=bias, **made)
                self._put(_path(op), module, op.name)
            case "linear":
                bias = any(w.name.endswith(".bias") for w in op.weights)
                module = nn.Linear(op.k, op.width, bias=bias, **made)
                self._put(_path(op), module, op.name)
            case "attention":
                self._put("self_attn.core" if hasattr(self, "self_attn") else "attn.core", Core(op, attention), op.name)
            case "router":
                self._put(_path(op), Router(op, self.numbers, **made), op.name)
            case "activation" if op.function not in ACTIVATIONS:
                raise SpecError(f"no module for the activation {op.function!r}", "model", sorted(ACTIVATIONS))
            case "add" | "multiply" | "activation" | "rope" | "dispatch" | "combine":
                pass
            case _:
                raise SpecError(
                    f"no module for {op.kind.replace('_', ' ')} yet: this model can be planned, not trained here", "model.model_type"
                )

    def module(self, op: Op | str) -> Any:
        return self.get_submodule(self.paths[op if isinstance(op, str) else op.name])

    def forward(self, x: torch.Tensor, context: Context, leave: int = 0) -> torch.Tensor:
        """`leave`: how many of the last operations are left to the caller."""
        values: dict[str, Any] = {"x": x}
        del x
        entered: dict[str, torch.Tensor] = {}
        ops = self.ops[: len(self.ops) - leave]
        for i, op in enumerate(ops):
            if op.name in self.within:
                continue
            self._run(op, values, entered, context)
            for name in op.inputs:
                if self.last[name] == i and name != op.output:
                    values.pop(name, None)
                    entered.pop(name, None)
        return values[ops[-1].output]

    def _run(self, op: Op, values: dict[str, Any], entered: dict[str, Any], context: Context) -> None:
        given = [values[name] for name in op.inputs if name in values]
        if self.enter is not None and op.inputs and op.kind in ("linear", "router"):
            name = op.inputs[0]
            if name not in entered:
                entered[name] = self.enter(name, op, given[0])
            given[0] = entered[name]
        match op.kind:
            case "embedding":
                values[op.output] = self.module(op)(values["x"] if op.output == "x" else context.positions)
            case "norm":
                x = given[0]
                values[op.output] = self.module(op)(x.unflatten(-1, (-1, op.head_dim))).flatten(-2) if op.heads else self.module(op)(x)
            case "linear":
                values[op.output] = self.module(op)(given[0])
            case "rope":
                q, k = (rotate(x, op.head_dim, context.tables, self.numbers) for x in given)
                values[op.output], values[_rotated_key(self.block, op)] = q, k
            case "attention":
                values[op.output] = self.module(op)(*given[:3], context)
            case "activation":
                values[op.output] = ACTIVATIONS[op.function](given[0])
            case "multiply":
                values[op.output] = given[0] * given[1]
            case "add":
                values[op.output] = given[0] + given[1]
            case "router":
                values[op.output] = self.module(op)(given[0].flatten(0, -2))
            case "dispatch":
                values[op.output] = given[0]
            case "combine":
                routed = values.pop(next(o.output for o in self.ops if o.kind == "dispatch"))
                values[op.output] = self.module("experts")(routed, *values[op.inputs[1]])


def _path(op: Op) -> str:
    """Where a product or norm stands: its weight's name, or its own where it borrows the weight (a tied head)."""
    return op.weights[0].name.removesuffix(".weight") if op.weights else op.name


def _within_experts(block: Block) -> dict[str, Op]:
    names = [op.name for op in block.ops]
    kinds = [op.kind for op in block.ops]
    between = block.ops[kinds.index("dispatch") + 1 : kinds.index("combine")]
    inside = {"routed"} | {op.output for op in between if op.kind == "grouped_linear"}
    found: dict[str, Op] = {}
    for op in between:
        if op.kind == "grouped_linear" or set(op.inputs) & inside:
            inside.add(op.output)
            found[op.name] = op
    assert len(set(names)) == len(names)
    return found


def _rotated_key(block: Block, op: Op) -> str:
    """The attention row names both rotated tensors, the rotary row only the first."""
    core = next(o for o in block.ops if o.kind == "attention" and op.output in o.inputs)
    return core.inputs[1]


class Decoder(nn.Module):
    """Some consecutive layers of a model, with the embedding where it is the first part and the head where it is the last.

    `forward(tokens or hidden, positions, documents)` gives hidden states, or logits (batch, tokens, vocabulary) from the last part; given `labels`, the last
    part gives what its `loss` makes of them. Without documents every sequence has the positions of the first, which are looked up once.
    """

    def __init__(
        self, model: ModelSpec, layers: Iterable[int], *, first: bool = True, last: bool = True, attention: str = "flash", **made: Any
    ) -> None:
        super().__init__()
        numbers = numbers_of(model)
        self.model, self.numbers = model, numbers
        self.attention = attention
        self.embed = Table(model.embedding, numbers, attention, **made) if first else None
        self.layers = nn.ModuleDict({str(i): Table(model.blocks[model.layers[i]], numbers, attention, **made) for i in layers})
        self.head = Table(model.head, numbers, attention, **made) if last else None
        self.rotary = any(op.kind == "rope" for b in model.blocks.values() for op in b)
        self.gathers_documents: Callable[[torch.Tensor], torch.Tensor] | None = None  # context parallelism's
        self.spans: tuple[tuple[str, ...], ...] = ()  # layers that one checkpoint spans
        self.loss: HeadLoss | None = None
        self.turn = Turn()
        if last and model.tied:
            self.tie()

    def tie(self) -> None:
        """The output projection is the embedding table itself; on another pipeline rank than the table it owns a copy."""
        head = self.head.module("lm_head") if self.head is not None else None
        if head is not None and self.embed is not None:
            head.weight = self.embed.module(self.model.embedding.ops[0]).weight

    def context(self, positions: torch.Tensor, documents: torch.Tensor | None = None) -> Context:
        found = Context(positions, documents)
        if documents is not None and self.gathers_documents is not None:
            found.everywhere = self.gathers_documents(documents)
        elif documents is not None:
            found.mask = documents_mask(documents)
        if self.rotary:
            found.tables = self.numbers.tables(positions)
        return found

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        context = self.context(positions if documents is not None else positions[:1], documents)
        if self.embed is not None:
            x = self.embed(x, context)
        if self.spans:
            for span in self.spans:
                x = checkpoint(self._run_span, span, x, context, use_reentrant=False)
        else:
            for layer in self.layers.values():
                x = layer(x, context)
        if self.head is None:
            return x
        if self.loss is None or labels is None:
            return self.head(x, context)
        return self.loss(self.head.module("lm_head"), self.head(x, context, leave=1), labels)

    def _run_span(self, span: tuple[str, ...], x: torch.Tensor, context: Context) -> torch.Tensor:
        for name in span:
            x = self.layers[name](x, context)
        return x


def initialize(name: str, parameter: torch.Tensor, seed: int, std: float = INITIAL_STD) -> None:
    """Fills a whole parameter from its name alone, so that every layout begins with the same model: matrices normal, norms one, biases zero."""
    with torch.no_grad():
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed((seed << 32 | zlib.crc32(name.encode())) & (2**63 - 1))
            made = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, std, generator=generator)
            parameter.copy_(made)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


def build(
    model: ModelSpec, *, attention: str = "flash", layers: Iterable[int] | None = None, first: bool = True, last: bool = True, **made: Any
) -> Decoder:
    """The model, or the part of it that a pipeline stage holds; parameters are left empty (see `initialize`)."""
    return Decoder(model, range(model.num_layers) if layers is None else layers, first=first, last=last, attention=attention, **made)
