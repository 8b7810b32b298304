"""A mixture with a capacity on the tape: router, places, batched products over as many rows for each expert, combine (GShard, arXiv:2006.16668 section 2.2).

Source: `train.modules` (Router, Experts) and `train.experts` (Capped), checked against allocation traces. All shapes are known beforehand: `factor` times the
mean number of rows, one row more for what is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...spec.blocks import Op
from . import ops
from .machine import Parameter, Run, Tensor
from .sizes import Size, plus

if TYPE_CHECKING:
    from .blocks import Environment
    from .modules import Modules

FP32, INT64 = 4, 8


def mixture(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    """Everything from the router's row to the combine's; the rows between are part of it."""
    s, r, count, top_k = step.symbols, step.run, op.experts, op.top_k
    x = env[op.inputs[0]]
    probabilities = ops.softmax(r, step.product(x, params[op.weights[0].name], s.tokens(count), None, "activations"))
    weights, chosen = _top_k(r, probabilities, s.tokens(top_k), s.tokens())
    weights = ops.cast(r, weights, x.dtype)
    del probabilities
    out = next(o for o in rows if o.kind == "combine")
    env[out.output] = _routed(step, op, params, rows, x, weights)
    del chosen


def _top_k(r: Run, p: Tensor, picked: Size, rows: Size) -> tuple[Tensor, Tensor]:
    """The largest probabilities of each token, divided by their sum; and which they are, which `topk` saves."""
    every = p.elements

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        zeros = r.new(every, FP32, "zeros")
        out = r.new(every, FP32, "scatter")
        del zeros
        return [out]

    def spread(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [Tensor(picked, FP32, g.storage)]

    def divided(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        parts = [r.new(picked, FP32, "divide") for _ in range(3)]
        product = r.new(picked, FP32, "divide")
        parts.clear()
        first, second = r.new(picked, FP32, "divide"), r.new(rows, FP32, "sum")
        del product
        return [first, second]

    chosen = r.new(picked, INT64, "chosen experts")
    values = r.op("top k", [p], picked, FP32, back, save=[chosen])
    total = r.op("sum", [values], rows, FP32, spread)
    return r.op("divide", [values, total], picked, FP32, divided, save=[values, total]), chosen


def _places(step: Modules, count: int, top_k: int) -> Tensor:
    """Which row each choice has: a running count over a one-hot matrix of 8-byte integers."""
    s, r = step.symbols, step.run
    every, picked = s.tokens(top_k * count), s.tokens(top_k)
    equal = r.new(every, 1, "one hot")
    hot = r.new(every, INT64, "one hot")
    del equal
    running = r.new(every, INT64, "running count")
    del hot
    gathered = r.new(picked, INT64, "places")
    del running
    before = r.new(picked, INT64, "places")
    del gathered
    fits = r.new(picked, 1, "places")
    scaled = r.new(picked, INT64, "places")
    row = r.new(picked, INT64, "places")
    del scaled
    slot = r.new(picked, INT64, "places")
    del fits, row, before
    return slot


def _routed(step: Modules, op: Op, params: dict[str, Parameter], rows: list[Op], x: Tensor, weights: Tensor) -> Tensor:
    s, r, hidden, dtype = step.symbols, step.run, op.k, x.dtype
    factor = step.setup.job.moe_capacity_factor or 1.0
    copies, room = s.tokens(op.top_k * hidden), s.room(op.experts, op.top_k, factor, hidden)
    more = plus(room, s.one(hidden))
    slot = _places(step, op.experts, op.top_k)
    taken = _taken(r, x, slot, copies, more)
    arrived = Tensor(room, dtype, taken.storage, r.node("slice", [taken.node], [], _fills(more, 1)) if taken.needs_grad else None)
    made = _experts(step, op, params, rows, arrived, factor)
    last = r.new(s.one(hidden), dtype, "zeros")
    back = r.op("cat", [made], more, dtype, lambda r, saved, g: [Tensor(room, g.dtype, g.storage)])
    del last
    found = r.op("index", [back], copies, dtype, _fills(more, 2), save=[slot])
    scaled = ops.multiply(r, found, weights, "weigh")
    out = r.op("sum over choices", [scaled], s.tokens(hidden), dtype, _fills(copies, 1))
    del found, scaled, back, made
    return out


def _taken(r: Run, x: Tensor, slot: Tensor, copies: Size, more: Size) -> Tensor:
    """Each token once a choice, written into zeros: `index_copy` saves what it writes."""
    zeros = r.new(more, x.dtype, "zeros")
    repeated = r.op("repeat", [x], copies, x.dtype, _fills(x.elements, 1))
    out = r.op("index copy", [repeated], more, x.dtype, _fills(copies, 1), save=[slot, repeated])
    del zeros
    return out


def _experts(step: Modules, op: Op, params: dict[str, Parameter], rows: list[Op], x: Tensor, factor: float) -> Tensor:
    """down(act(gate(x)) up(x)), one batched product a weight; the gradient of a transposed weight is copied into its order."""
    r = step.run
    named = {o.name: o for o in rows if o.kind == "grouped_linear"}

    def turned(name: str) -> Tensor:
        p = params[named[name].weights[0].name]
        whole, elements = p.tensor(), p.elements
        if not whole.needs_grad:
            return whole

        def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
            return [r.new(elements, g.dtype, "weight gradient", "gradients")]

        whole.node = r.node("transpose", [whole.node], [], back)
        return whole

    up, down, gate = turned("up_proj"), turned("down_proj"), turned("gate_proj")
    inner = step.symbols.room(op.experts, op.top_k, factor, named["up_proj"].width)
    activation = next(o for o in rows if o.kind == "activation" and o.experts)
    left = ops.activation(r, ops.batched(r, x, gate, inner, "gate"), activation.function)
    product = ops.multiply(r, left, ops.batched(r, x, up, inner, "up"))
    del left
    return ops.batched(r, product, down, x.elements, "down")


def _fills(size: Size, tensors: int) -> Any:
    """A gradient of that size; with two, zeros go when the second is there."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        zeros = [r.new(size, g.dtype, "zeros") for _ in range(tensors - 1)]
        out = r.new(size, g.dtype, "gradient")
        zeros.clear()
        return [out]

    return back
