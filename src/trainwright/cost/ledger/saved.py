"""What the forward pass of a block leaves for its backward pass, as a set of named tensors that follows from the kinds of its rows.

A tensor that two operations save counts once. Which tensors are saved depends on the kernels (`frameworks.base.SaveRules`), on what is
trained (a
frozen product saves no input) and on recomputation; how large they are depends on the plan (`size`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ...frameworks.base import SaveRules
from ...spec.blocks import Block, Op
from ...spec.plan import Structure
from ..table import Column
from .scope import Scope, add_up, ceil_div

Layout = Literal["sequence", "tensor", "whole", "routed", "routed_tensor", "scores", "heads", "lse_rounded", "scattered"]


@dataclass(frozen=True, slots=True)
class Saved:
    """`width` elements a token of `bytes` each (scores: heads, each of seq x seq).

    layouts: sequence = sequence_tokens x width; scattered = the same where tp > 1; tensor = tokens x width / tp; whole = tokens x width; routed = rows of
    experts x width; routed_tensor = rows of experts x width / etp; scores = b heads / tp x seq / cp x seq; heads = tokens x whole heads / tp.
    `first` is the index of the first row that needs it: backward frees it there. `module` groups what is recomputed together.
    """

    tensor: str
    layout: Layout
    width: float
    bytes: float
    first: int
    module: str = ""


def size(saved: Saved, scope: Scope) -> Column:
    """Bytes of a saved tensor on one rank for one micro-batch."""
    match saved.layout:
        case "sequence":
            elements = scope.sequence_tokens * saved.width
        case "scattered":
            elements = scope.sequence_tokens * saved.width * (scope.tp > 1)
        case "tensor" | "heads":
            elements = scope.tokens * ceil_div(saved.width, scope.tp)
        case "whole":
            elements = scope.tokens * saved.width
        case "routed":
            elements = scope.routed_tokens * saved.width
        case "routed_tensor":
            elements = scope.routed_tokens * ceil_div(saved.width, scope.etp)
        case "scores":
            elements = scope.b * ceil_div(saved.width, scope.tp) * scope.rank_seq * float(scope.job.seq_len)
        case _:
            elements = scope.b * ceil_div(saved.width, scope.tp) * ceil_div(scope.rank_seq, 32) * 32
    return elements * saved.bytes


def total(tensors: tuple[Saved, ...], scope: Scope) -> Column:
    return add_up((size(s, scope) for s in tensors), len(scope))


@dataclass(frozen=True)
class Kernels:
    """Everything beside the block that decides what is saved; hashable, so that the answer is kept."""

    rules: SaveRules
    c: int
    attention: str
    dropout: bool
    fp8: bool
    method: str
    targets: tuple[str, ...]
    rank: int
    sharded_sequence: bool
    fp32_stream: bool = False
    adapter_dropout: bool = False

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return 4 if self.fp32_stream else self.c


def kernels_of(scope: Scope, rules: SaveRules) -> Kernels:
    job, structure = scope.job, scope.structure
    if structure.compile:
        rules = replace(rules, fused_norm=True, fused_gate=True)
    return Kernels(
        rules=rules,
        c=scope.c,
        attention=structure.attention,
        dropout=job.dropout > 0,
        fp8=job.precision in ("fp8", "fp4") and rules.fp8_inputs,
        method=job.method,
        targets=job.lora_targets,
        rank=job.lora_rank,
        sharded_sequence=structure.sequence_parallel,
        fp32_stream=scope.fp32_stream,
        adapter_dropout=scope.adapter_dropout,
    )


def is_frozen(kernels: Kernels) -> bool:
    return kernels.method != "full"


def targeted(op: Op, kernels: Kernels) -> bool:
    """Whether an adapter sits on this product."""
    return op.kind in ("linear", "grouped_linear") and op.name in kernels.targets


@lru_cache(maxsize=4096)
def saved_by(block: Block, kernels: Kernels) -> tuple[Saved, ...]:
    """Every tensor that `block` saves without recomputation."""
    found: dict[str, Saved] = {}
    where = layouts(block, kernels.rules)
    modules = module_of_rows(block)

    def keep(tensor: str, layout: Layout, width: float, each: float, i: int) -> None:
        old = found.get(tensor)
        if old is None or each > old.bytes or layout == "whole":
            found[tensor] = Saved(tensor, layout, width, each, min(i, old.first) if old else i, old.module if old else modules[i])

    def keep_input(tensor: str, i: int, each: float) -> None:
        layout, width = where.get(tensor, ("sequence", 0))
        keep(tensor, layout, width, each, i)

    for i, op in enumerate(block.ops):
        for tensor, layout, width, each in _saves(op, i, block, where, kernels):
            if layout:
                keep(tensor, layout, width, each, i)
            else:
                keep_input(tensor, i, each)
    return tuple(found.values())


def layouts(block: Block, rules: SaveRules) -> dict[str, tuple[Layout, int]]:
    """(layout, width) of every tensor that a row of the block makes, and of what enters it."""
    found: dict[str, tuple[Layout, int]] = {}
    norm_widths = [op.width for op in block.ops if op.kind == "norm" and op.region == "sequence"]
    found["x"] = ("sequence", block.ops[0].width if block.ops[0].kind == "norm" else max(norm_widths, default=block.ops[-1].width))
    for op in block.ops:
        if op.kind == "dispatch" or (op.experts and op.region == "sequence" and op.kind == "grouped_linear"):
            found[op.output] = ("routed", op.width)
        elif op.experts and op.kind not in ("router", "combine"):
            row = op.kind == "grouped_linear" and op.parallel == "row"
            found[op.output] = ("routed" if row else "routed_tensor", op.width)
        else:
            found[op.output] = ("tensor" if op.region == "tensor" else "sequence", op.width)
    return found


def module_of_rows(block: Block) -> list[str]:
    """The part of a layer that each row belongs to: attention, norm, mlp, moe, shared_experts, residual."""
    parts, seen_attention = [], False
    has_attention = any(op.kind in ("attention", "linear_attention") for op in block.ops)
    for op in block.ops:
        named = f"{op.name} {op.output} {' '.join(w.name for w in op.weights)}"
        if op.kind == "norm" and op.region == "sequence":
            parts.append("norm")
        elif op.kind == "add":
            seen_attention = True
            parts.append("residual")
        elif "shared" in named:
            parts.append("shared_experts")
        elif op.experts:
            parts.append("moe")
        elif seen_attention or not has_attention or "mlp." in named:
            parts.append("mlp")
        else:
            parts.append("attention")
    return parts


_Row = tuple[str, Layout | Literal[""], float, float]


def _saves(op: Op, i: int, block: Block, where: dict[str, tuple[Layout, int]], k: Kernels) -> list[_Row]:
    """(tensor, layout or "" for the tensor's own, elements a token, bytes each) that one row keeps."""
    match op.kind:
        case "linear" | "grouped_linear":
            return _linear(op, where, k)
        case "norm":
            return _norm(op, where, k)
        case "attention":
            return _attention(op, k)
        case "linear_attention":
            kept: list[_Row] = [(t, "", 0, k.c) for t in op.inputs]
            return [*kept, (f"{op.name}:decay", "heads", float(op.heads * 64), k.c), (op.output, "", 0, k.c)]
        case "conv1d":
            return [(op.inputs[0], "", 0, k.c)]
        case "activation":
            if op.function == "softmax":
                return [(op.output, "", 0, k.c)]
            return [(op.inputs[0], "", 0, k.c)]
        case "multiply":
            made_by = {o.output: o for o in block.ops}
            inputs = [t for t in op.inputs if not (k.rules.fused_gate and t in made_by and made_by[t].kind == "activation")]
            return [(t, "", 0, k.c) for t in inputs]
        case "add":
            feeds = {o.output for o in block.ops if o.kind in ("linear", "combine") and o.region == "sequence"}
            if k.dropout and any(t in feeds for t in op.inputs):
                return [(f"{op.output}:mask", "sequence", op.width, 1)]
            return []
        case "router":
            return [
                (op.inputs[0], "", 0, k.c),
                (f"{op.name}:scores", "sequence", op.width, 4),
                (f"{op.name}:probabilities", "sequence", op.top_k, 12),
            ]
        case "dispatch":
            return [(f"{op.name}:rows", "sequence", 2 * op.top_k, 4)]
        case "combine":
            kept = [(f"{op.name}:rows", "sequence", op.top_k, 4)]
            return kept if k.rules.probabilities_in_activation else [*kept, (op.inputs[0], "", 0, k.c)]
        case _:
            return []


def _linear(op: Op, where: dict[str, tuple[Layout, int]], k: Kernels) -> list[_Row]:
    """x of y = x W^T where W wants a gradient; an adapter saves x and what it makes of it; a 4-bit product of bitsandbytes saves x too."""
    x = op.inputs[0]
    layout, width = where.get(x, ("sequence", op.k))
    if layout == "sequence" and op.parallel == "column" and k.rules.keeps_gathered_inputs and k.sharded_sequence:
        layout = "whole"
    rows: list[_Row] = []
    adapted = is_frozen(k) and targeted(op, k)
    # every product casts the fp32 stream for itself, unless a compiler joins their casts
    split = k.fp32_stream and layout in ("sequence", "whole") and not k.rules.fused_norm
    width = width or op.k
    if not is_frozen(k) or (k.method == "qlora" and op.name != "lm_head"):
        fp8 = k.fp8 and op.name != "lm_head"
        rows.append((f"{x}:{op.name}" if split else f"{x}:fp8" if fp8 else x, layout, float(width), 1 if fp8 else k.c))
    if adapted:
        if k.adapter_dropout:  # the copy that dropout makes, and its mask
            rows.append((f"{op.name}:dropped", layout, float(width), k.c + 1))
        else:
            rows.append((f"{op.name}:cast" if split else x, layout, float(width), k.c))
        rows.append((f"{op.name}:lora", "routed" if op.kind == "grouped_linear" else "whole", float(k.rank), k.c))
    return rows


def _norm(op: Op, where: dict[str, tuple[Layout, int]], k: Kernels) -> list[_Row]:
    x = op.inputs[0]
    layout: Layout = "tensor" if op.region == "tensor" else "sequence"
    groups = float(max(op.heads, 1))
    statistics = 2 if op.function.startswith("layer") else 1
    stats: _Row = (f"{op.name}:statistics", layout, groups * statistics, 4)
    c = k.stream if layout == "sequence" else k.c
    if k.rules.fused_norm or op.function.startswith("layer") or c == 4:
        rows: list[_Row] = [(x, layout, float(op.width), c), stats]
        if c == 4 and not is_frozen(k) and not k.rules.fused_norm and op.function.startswith("rms"):
            rows.append((f"{op.name}:normalized", layout, float(op.width), 4))
        return rows
    rows = [(f"{op.name}:fp32", layout, float(op.width), 4), stats]
    if not is_frozen(k):
        rows.append((f"{op.name}:normalized", layout, float(op.width), k.c))
    return rows


def _attention(op: Op, k: Kernels) -> list[_Row]:
    q, key, v = (*op.inputs, *op.inputs, *op.inputs)[:3]
    d_v = op.v_head_dim or op.head_dim
    repeated = op.heads if k.attention in ("efficient", "eager", "sdpa-math") else op.kv_heads
    rows: list[_Row] = [
        (q, "heads", float(op.heads), op.head_dim * k.c),
        (key, "heads", float(repeated), op.head_dim * k.c),
        (v, "heads", float(repeated), d_v * k.c),
    ]
    if k.attention in ("flash", "efficient"):
        rows.append((op.output, "tensor", float(op.heads * d_v), k.c))
        rows.append((f"{op.name}:logsumexp", "heads" if k.attention == "flash" else "lse_rounded", float(op.heads), 4))
        return rows
    rows.append((f"{op.name}:softmax", "scores", float(op.heads), k.c))
    if k.rules.scores_fp32 and k.c < 4:
        rows.append((f"{op.name}:softmax_fp32", "scores", float(op.heads), 4))
    if k.dropout:
        rows.append((f"{op.name}:mask", "scores", float(op.heads), 1))
        rows.append((f"{op.name}:dropped", "scores", float(op.heads), k.c))
    return rows


# ---- recomputation


def kept_by(block: Block, kernels: Kernels, structure: Structure, selective: str) -> tuple[Saved, ...]:
    """What stays when the block is recomputed as `structure` says; all of it without recomputation."""
    everything = saved_by(block, kernels)
    if structure.recompute == "none":
        return everything
    if structure.recompute == "full":
        return tuple(s for s in everything if s.tensor == "x") or (_block_input(block, kernels),)
    modules = structure.recompute_modules or (("core_attn",) if selective == "core_attn" else ())
    if modules:
        return drop_modules(block, everything, modules)
    scatters = kernels.sharded_sequence and kernels.rules.keeps_gathered_inputs and not structure.compile
    return _every_second_product(block, kernels, everything, scatters)


def _block_input(block: Block, kernels: Kernels) -> Saved:
    layout, width = layouts(block, kernels.rules)["x"]
    return Saved("x", layout, width, kernels.stream, 0)


def block_input(block: Block, kernels: Kernels) -> Saved:
    """The tensor that enters a block, which is what a checkpoint keeps."""
    return _block_input(block, kernels)


def drop_modules(block: Block, everything: tuple[Saved, ...], modules: tuple[str, ...]) -> tuple[Saved, ...]:
    """Megatron's ``--recompute-modules``: what each of them throws away after forward (megatron/core/transformer/transformer_config.py)."""
    made_by = {op.output: op for op in block.ops}
    attention = next((op for op in block.ops if op.kind == "attention"), None)
    hidden = layouts(block, SaveRules())["x"][1]
    norm_outputs = {op.output for op in block.ops if op.kind == "norm" and op.region == "sequence" and op.width == hidden}
    expert_activations = {op.inputs[0] for op in block.ops if op.kind == "grouped_linear" and op.parallel == "row"}

    def dropped(s: Saved) -> bool:
        name = s.tensor.removesuffix(":fp8")
        if "core_attn" in modules and attention and s.tensor.startswith(f"{attention.name}:"):
            return True
        if "mla_up_proj" in modules and attention and attention.head_dim != attention.v_head_dim and name in attention.inputs:
            return True
        if "layernorm" in modules and name in norm_outputs:
            return True
        if "moe_act" in modules and name in expert_activations:
            return True
        if name in norm_outputs or name == "x":
            return False
        op = made_by.get(name)
        if s.module == "residual" or (op is not None and op.kind == "add"):
            return False
        for module in ("mlp", "moe", "shared_experts"):
            if module in modules and (s.module == module or (module == "moe" and s.module == "shared_experts")):
                return True
        return False

    return tuple(s for s in everything if not dropped(s))


def _every_second_product(block: Block, kernels: Kernels, everything: tuple[Saved, ...], scatters: bool) -> tuple[Saved, ...]:
    """torchtitan's op list: outputs of every odd-numbered product without bias in call order, attention's outputs, and with sequence parallelism
    (`scatters`) what its reduce-scatters leave; the partial sums that enter them are whole. A compiled block drops what backward does not read: them."""
    where = layouts(block, kernels.rules)
    names = {s.tensor: s for s in everything}
    kept: dict[str, Saved] = {"x": _block_input(block, kernels)}
    products = [op for op in block.ops if op.kind == "linear" and len(op.weights) == 1]
    for number, op in enumerate(products):
        if number % 2 == 0:
            layout, width = where[op.output]
            kept[op.output] = names.get(op.output) or Saved(op.output, layout, width, kernels.c, 0)
            if scatters and op.parallel == "row":
                kept[op.output] = Saved(op.output, "whole", width, kernels.c, 0)
    for op in block.rows("linear") if scatters else ():
        if op.parallel == "row":
            kept[f"{op.output}:scattered"] = Saved(f"{op.output}:scattered", "scattered", op.width, kernels.c, 0)
    for s in everything:
        if s.tensor.endswith(":logsumexp") or any(op.kind == "attention" and s.tensor == op.output for op in block.ops):
            kept[s.tensor] = s
    return tuple(kept.values())
