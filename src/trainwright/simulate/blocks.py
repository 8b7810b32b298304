"""The units of the model on one rank of any mesh: embedding, transformer block, final norm with head and loss.

Written once: with groups of one rank it is the model of one device, with larger groups the same lines run tensor, sequence, context and expert parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import context, expert, layers, tensor
from .collectives import Array

if TYPE_CHECKING:
    from .run import Micro, Run

Backward = Callable[[Any], Array]


def norm(run: Run, name: str, x: Array) -> tuple[Array, Backward]:
    def scale() -> Array:
        return run.weight(name + ".scale")

    if run.config.norm == "rms":
        y, norm_backward = layers.rms_norm(x, scale)
    else:
        y, norm_backward = layers.layer_norm(x, scale, lambda: run.weight(name + ".shift"))

    def backward(dy: Array) -> Array:
        dx, *grads = norm_backward(dy)

        def weight_gradient() -> None:
            for part, grad in zip((".scale", ".shift"), grads):
                run.add(name + part, grad)

        run.later(weight_gradient)
        return run.cast_gradient(dx)

    return run.cast(y), backward


def attention(run: Run, unit: int, x: Array, micro: Micro) -> tuple[Array, Backward]:
    """Projections by columns (whole heads), attention over the ring, projection by rows."""
    at, config, shape = f"{unit}.", run.config, micro.tokens.shape
    q_bias, v_bias, o_bias = (at + n + ".bias" if config.bias else None for n in "qvo")
    full, enter_backward, again = tensor.enter(run, x)
    q = tensor.affine(run, full, at + "q", q_bias).reshape(*shape, -1, config.head_dim)
    k = tensor.affine(run, full, at + "k").reshape(*shape, -1, config.head_dim)
    v = tensor.affine(run, full, at + "v", v_bias).reshape(*shape, -1, config.head_dim)
    del full
    rotates = config.positions == "rope"
    if rotates:
        q, k = layers.rotary(q, micro.positions), layers.rotary(k, micro.positions)
    mixed, core_backward = context.attention(run, q, k, v)
    rows = mixed.reshape(micro.tokens.size, -1)
    del q, k, v, mixed
    y, leave_backward = tensor.leave(run, tensor.affine(run, rows, at + "o"))
    if o_bias:
        y = y + run.weight(o_bias)

    def backward(dy: Array) -> Array:
        if o_bias:
            run.later(lambda: run.add(o_bias, dy.sum(0)))
        drows = tensor.affine_backward(run, rows, leave_backward(dy), at + "o")
        dq, dk, dv = core_backward(drows.reshape(*shape, -1, config.head_dim))
        if rotates:
            dq, dk = layers.rotary(dq, micro.positions, -1), layers.rotary(dk, micro.positions, -1)
        source, flat = again(), (micro.tokens.size, -1)
        dx = tensor.affine_backward(run, source, run.cast_gradient(dq.reshape(flat)), at + "q", q_bias)
        dx = dx + tensor.affine_backward(run, source, run.cast_gradient(dk.reshape(flat)), at + "k")
        dx = dx + tensor.affine_backward(run, source, run.cast_gradient(dv.reshape(flat)), at + "v", v_bias)
        return enter_backward(dx)

    return y, backward


def feed_forward(run: Run, unit: int, x: Array, micro: Micro) -> tuple[Array, Backward]:
    """SwiGLU or GELU between a product by columns and one by rows; a mixture where the model has experts."""
    if run.config.experts:
        return expert.mixture(run, unit, x, micro)
    at, config = f"{unit}.", run.config
    up_bias, down_bias = (at + n + ".bias" if config.bias else None for n in ("up", "down"))
    full, enter_backward, again = tensor.enter(run, x)
    up = tensor.affine(run, full, at + "up", up_bias)
    if config.gated:
        hidden, act_backward = layers.swiglu(tensor.affine(run, full, at + "gate"), up)
    else:
        hidden, act_backward = layers.gelu(up)
    hidden = run.cast(hidden)
    del full, up
    y, leave_backward = tensor.leave(run, tensor.affine(run, hidden, at + "down"))
    if down_bias:
        y = y + run.weight(down_bias)

    def backward(dy: Array) -> Array:
        if down_bias:
            run.later(lambda: run.add(down_bias, dy.sum(0)))
        dhidden = tensor.affine_backward(run, hidden, leave_backward(dy), at + "down")
        source = again()
        grads = act_backward(dhidden)
        dgate, dup = grads if config.gated else (None, grads)
        dx = tensor.affine_backward(run, source, run.cast_gradient(dup), at + "up", up_bias)
        if dgate is not None:
            dx = dx + tensor.affine_backward(run, source, run.cast_gradient(dgate), at + "gate")
        return enter_backward(dx)

    return y, backward


def block(run: Run, unit: int, x: Array, micro: Micro) -> tuple[Array, Backward]:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""
    normed, norm_backward = norm(run, f"{unit}.attention_norm", x)
    mixed, attention_backward = attention(run, unit, normed, micro)
    middle = run.cast(x + mixed)
    normed, second_norm_backward = norm(run, f"{unit}.ffn_norm", middle)
    fed, feed_forward_backward = feed_forward(run, unit, normed, micro)
    y = run.cast(middle + fed)
    del normed, mixed, middle, fed, x

    def backward(dy: Array) -> Array:
        dmiddle = dy + second_norm_backward(feed_forward_backward(dy))
        return run.cast_gradient(dmiddle + norm_backward(attention_backward(dmiddle)))

    return y, backward


def head(run: Run, x: Array, micro: Micro) -> tuple[float, Backward]:
    """Final norm, logits, summed loss; backward takes what one token's loss counts."""
    normed, norm_backward = norm(run, "final_norm", x)
    loss, head_backward = tensor.head(run, normed, micro.targets)
    del normed, x
    return loss, lambda scale: norm_backward(head_backward(scale))


def unit(run: Run, number: int, x: Any, micro: Micro) -> tuple[Any, Backward]:
    """Unit `number`: 0 takes no input, the last returns a loss."""
    if number == 0:
        return tensor.embedding(run, micro.tokens, micro.positions)
    if number == run.config.head_unit:
        return head(run, x, micro)
    return block(run, number, x, micro)
