"""Rows of a block -> operations of the tape, as transformers' modules run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...spec.blocks import Block, Op
from . import ops, tensor
from .experts import mixture
from .machine import Parameter, Tensor
from .sizes import Size

if TYPE_CHECKING:
    from .modules import Modules


class Environment:
    """Named tensors of a block while it runs, dropped as Python would drop them.

    An expression's temporaries (an MLP) go with their last use; what a module's function holds in local variables or got as an argument
    stays until it returns: its input, and in attention everything that is not assigned again.
    """

    def __init__(self, block_ops: list[Op], x: Tensor) -> None:
        self.values: dict[str, Tensor] = {"x": x}
        self.drops = drops(block_ops)
        self.modules = {op.output: module for op, module in zip(block_ops, modules(block_ops))}

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.values[name] = value

    def after(self, i: int) -> None:
        for name in self.drops.get(i, ()):
            self.values.pop(name, None)


def modules(block_ops: list[Op]) -> list[str]:
    """The submodule that each row belongs to, from the names of its weights; rows without weights belong to the module before them."""
    found, current = [], ""
    for op in block_ops:
        if op.weights:
            path = op.weights[0].name.split(".")
            current = path[0] if len(path) > 2 else ""
        elif op.kind == "add":
            current = ""
        found.append(current)
    return found


def drops(block_ops: list[Op]) -> dict[int, list[str]]:
    """After which row each name goes."""
    where = modules(block_ops)
    last_of_module = {m: i for i, m in enumerate(where) if m}
    attention_modules = {m for m, op in zip(where, block_ops) if op.kind in ("attention", "linear_attention")}
    made: dict[str, int] = {"x": -1}
    last: dict[str, int] = {"x": len(block_ops) - 1}
    for i, op in enumerate(block_ops):
        for name in op.inputs:
            last[name] = max(last.get(name, 0), i)
            outside = name in made and (made[name] < 0 or where[made[name]] != where[i])
            rebound = op.kind in ("rope", "norm")
            if where[i] and not rebound and (outside or where[i] in attention_modules):
                last[name] = max(last[name], last_of_module[where[i]])
        made[op.output] = i
    result: dict[int, list[str]] = {}
    for name, i in [*last.items(), *((f"@{m}", i) for m, i in last_of_module.items())]:
        result.setdefault(i, []).append(name)
    return result


def ordered(block_ops: Iterable[Op], norms_last: bool = False) -> list[Op]:
    """act(gate(x)) runs before up(x), q_norm(q_proj(x)) before k_proj(x): both move up to right after what they need, norms unless `norms_last`."""
    result: list[Op] = []
    for op in block_ops:
        if op.kind == "activation" or (op.kind == "norm" and not norms_last):
            at = next((i for i, o in enumerate(result) if o.output in op.inputs), len(result) - 1)
            result.insert(at + 1, op)
        else:
            result.append(op)
    return result


def run_block(step: Modules, block: Block, params: dict[str, Parameter], x: Tensor) -> Tensor:
    """The rows of a block in order; returns its last output."""
    rows = ordered(block.ops, step.setup.model.family in NORMS_LAST)
    env = Environment(rows, x)
    del x
    i, skip = 0, False
    for i, op in enumerate(rows):
        run_op(step, op, params, env, rows)
        env.after(i)
    del skip
    return env[rows[-1].output]


def run_op(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    if op.experts and op.kind != "router":
        return  # the router's row runs the whole mixture
    kinds = {
        "router": mixture,
        "norm": norm,
        "linear": linear,
        "rope": rope,
        "attention": attention,
        "activation": activation,
        "multiply": multiply,
        "add": add,
    }
    kinds[op.kind](step, op, params, env, rows)


KINDS = frozenset({"norm", "linear", "rope", "attention", "activation", "multiply", "add", "embedding", "cross_entropy"})
MIXTURE = frozenset({"router", "dispatch", "grouped_linear", "combine"})  # with a capacity


# how transformers 5 writes the norms and rotary embeddings of some families (modeling_<family>.py)
LATE_CAST = frozenset({"gemma", "gemma2", "gemma3", "olmo2", "olmo3"})  # the weight multiplies in fp32
ONE_PLUS = frozenset({"gemma", "gemma2", "gemma3"})  # 1 + weight, made in fp32 each time
NORMS_LAST = frozenset({"gemma3"})  # queries and keys are normalized after all three projections
WIDE_LAYER_NORM = frozenset({"olmo"})  # layer_norm of an fp32 copy
WIDE_ROTARY = frozenset({"olmo", "olmo2", "olmo3"})  # cos and sin stay fp32, the result is cast back


def norm(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    s = step.symbols
    per_head = op.heads > 0
    count = s.split(op.heads) if per_head else s.sequence() if op.region == "sequence" else s.tokens()
    weights = [params[w.name].tensor() for w in op.weights]
    w = weights[0] if weights else None
    b = weights[1] if len(weights) > 1 else None
    x = env[op.inputs[0]]
    if op.function.startswith("rms"):
        if w is not None and step.setup.model.family in ONE_PLUS:
            w = ops.scale(step.run, ops.cast(step.run, w, ops.FP32))
        env[op.output] = ops.rms_norm(step.run, x, count, w, step.setup.model.family in LATE_CAST)
    elif step.setup.model.family in WIDE_LAYER_NORM:
        env[op.output] = ops.cast(step.run, ops.fused_norm(step.run, ops.cast(step.run, x, ops.FP32), count, w, b, 2), x.dtype)
    else:
        env[op.output] = ops.fused_norm(step.run, x, count, w, b, 2)


def linear(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    """A product, LoRA's adapters beside it, and the view by head where attention copies the gradient back into rows."""
    x = env[op.inputs[0]]
    if step.symbols.tensor_parallel and op.parallel == "column":
        x = column_input(step, op, env, x)
    out = step.linear(op, params, x)
    if needs_rows(step, op, rows):
        out = ops.rows(step.run, out)
    env[op.output] = out


def column_input(step: Modules, op: Op, env: Environment, x: Tensor) -> Tensor:
    """The whole input of a column-parallel product: gathered once a module with sequence parallelism, else its gradient is added up."""
    if not step.symbols.sequence_parallel:
        return tensor.reduce_gradient(step.run, x)
    module = env.modules.get(op.output, "")
    key = f"@{module}"
    if not module or key not in env.values:
        env.values[key] = step.gathered(x, op.k)
    return env.values[key] if module else env.values.pop(key)


def needs_rows(step: Modules, op: Op, rows: list[Op]) -> bool:
    """Queries and keys that turn (rotary) and everything in eager attention come back by head; fused kernels write rows."""
    readers = [o for o in rows if op.output in o.inputs]
    while readers and readers[0].kind == "norm":
        readers = [o for o in rows if readers[0].output in o.inputs]
    if not readers or readers[0].kind not in ("rope", "attention"):
        return False
    core = next((o for o in rows if o.kind == "attention"), None)
    if core is None:
        return False
    repeated = core.kv_heads != core.heads and op.width != core.heads * core.head_dim
    kind = step.setup.structure.attention
    return readers[0].kind == "rope" or kind in ("eager", "sdpa-math") or (kind == "efficient" and repeated)


def rope(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    core = next(o for o in rows if o.kind == "attention")
    q, k = op.inputs
    tables = step.rotary_tables(op.head_dim)
    wide = step.setup.model.family in WIDE_ROTARY
    turned = [ops.rotary(step.run, env[name], tables) for name in (q, k)]
    if wide:
        turned = [ops.cast(step.run, t, env[name].dtype) for t, name in zip(turned, (q, k))]
    env[core.inputs[0]], env[core.inputs[1]] = turned


def attention(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    r = step.run
    args = [env[name] for name in op.inputs]
    core = step.attention_core(op)
    env[op.output] = step.maybe_checkpoint("core_attn", core, args) if r.recording else core(*args)


def activation(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    env[op.output] = ops.activation(step.run, env[op.inputs[0]], op.function)


def multiply(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    env[op.output] = ops.multiply(step.run, env[op.inputs[0]], env[op.inputs[1]])


def add(step: Modules, op: Op, params: dict[str, Parameter], env: Environment, rows: list[Op]) -> None:
    out: Size = step.symbols.region(op.region, op.width)
    env[op.output] = ops.add(step.run, env[op.inputs[0]], env[op.inputs[1]], out)
