"""PyTorch's operations on the tape: what each allocates, saves for backward and allocates in backward.

Source: torch 2.13 derivatives.yaml and the C++ expressions behind it; checked op by op against allocation traces under fake tensors.
Every function takes the `Run` first and tensors next; bytes follow from elements and the bytes of a type.
"""

from __future__ import annotations

from typing import Any

from .machine import Node, Parameter, Run, Storage, Tensor
from .sizes import Size

FP32 = 4


class Expanded(Tensor):
    """A view whose storage is smaller than its elements say; what saves it keeps the storage only, what copies it makes it whole."""

    __slots__ = ()

    def __init__(self, elements: Size, dtype: int, storage: Storage | None, node: Node | None, stored: Size) -> None:
        super().__init__(elements, dtype, storage, node)


def cast(r: Run, x: Tensor, dtype: int, part: str = "activations") -> Tensor:
    """``x.to(dtype)``: nothing where it has that type."""
    if x.dtype == dtype:
        return x
    before = x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(g.elements, before, "cast", "gradients" if leaf else part)]

    leaf = isinstance(x.node, Parameter)
    return r.op("cast", [x], x.elements, dtype, back, part=part)


def linear(
    r: Run, x: Tensor, w: Parameter, out: Size, bias: Parameter | None = None, part: str = "activations", weight: Tensor | None = None
) -> Tensor:
    """``x W^T (+ b)``: saves x where W is trained, W where x wants a gradient. `weight`: a copy of W in another type (autocast)."""
    wt = weight or w.tensor()
    b = None if bias is None else bias.tensor()
    return matmul(r, x, wt, out, b, part, bias_elements=bias.elements if bias else ())


def matmul(
    r: Run, x: Tensor, wt: Tensor, out: Size, b: Tensor | None = None, part: str = "activations", bias_elements: Size = ()
) -> Tensor:
    want_w, want_x = wt.needs_grad, x.needs_grad
    want_b, count = b is not None and b.needs_grad, 2 if b is None else 3
    dtype, xe, we = x.dtype, x.elements, wt.elements

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        gw = r.new(we, dtype, "weight gradient", "gradients") if want_w else None
        gx = r.new(xe, dtype, "input gradient") if want_x else None
        gb = r.new(bias_elements, dtype, "bias gradient", "gradients") if want_b else None
        return [gx, gw, gb][:count]

    save = ([x] if want_w else []) + ([wt] if want_x else [])
    inputs = [x, wt] if b is None else [x, wt, b]
    return r.op("linear", inputs, out, x.dtype, back, save=save, part=part, cache="mm" if b is None else "addmm")


def embedding(r: Run, w: Parameter, out: Size, dtype: int, gradient: Size) -> Tensor:
    """A row of the table for each token; backward makes the gradient of the whole table, also where only a part is held."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(gradient, dtype, "embedding gradient", "gradients")]

    return r.op("embedding", [w.tensor()], out, dtype, back)


def add(r: Run, a: Tensor, b: Tensor, out: Size | None = None, summed: Size = ()) -> Tensor:
    """``a + b``: the wider type wins; the gradient goes to both, cast where an input is narrower, summed (into `summed`) where b is
    smaller."""
    dtype = max(a.dtype, b.dtype)
    elements = out or a.elements
    shapes = [(t.elements, t.dtype, t.needs_grad) for t in (a, b)]

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for e, d, wanted in shapes:
            if not wanted:
                made.append(None)
                continue
            one = g if e == elements else r.new(summed, dtype, "sum").reshaped(e)
            made.append(one if d == dtype else r.new(e, d, "cast"))
            del one
        return made

    return r.op("add", [a, b], elements, dtype, back)


def multiply(r: Run, a: Tensor, b: Tensor, name: str = "multiply") -> Tensor:
    """``a * b``, b perhaps broadcast: saves what the other's gradient needs; a broadcast gradient is made whole, then summed."""
    want_a, want_b = a.needs_grad, b.needs_grad
    ae, be, adt, bdt = a.elements, b.elements, a.dtype, b.dtype
    broadcast = be != ae
    dtype = max(adt, bdt)
    sums = "gradients" if isinstance(b.node, Parameter) else "activations"

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        ga = r.new(ae, dtype, name) if want_a else None
        gb = r.new(ae, dtype, name) if want_b else None
        if want_b and broadcast:
            whole, gb = gb, r.new(be, dtype, "sum", sums)
            del whole
        if ga is not None and adt != dtype:
            ga = r.new(ae, adt, "cast")
        if gb is not None and bdt != dtype:
            gb = r.new(be, bdt, "cast")
        return [ga, gb]

    save = ([b] if want_a else []) + ([a] if want_b else [])
    return r.op(name, [a, b], ae, dtype, back, save=save)


def scale(r: Run, a: Tensor) -> Tensor:
    """``a * number``."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(g.elements, g.dtype, "scale")]

    return r.op("scale", [a], a.elements, a.dtype, back)


def plus_constant(r: Run, a: Tensor) -> Tensor:
    """``a + mask``: a tensor of its own; the gradient passes."""
    return r.op("add", [a], a.elements, a.dtype, lambda r, saved, g: [g])


def activation(r: Run, x: Tensor, function: str) -> Tensor:
    """silu, gelu, relu: the input is saved (relu: the output); one kernel each way. relu2 squares: its relu is saved as well."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(g.elements, g.dtype, f"{function} backward")]

    out = r.op(
        function, [x], x.elements, x.dtype, back, save=() if function.startswith("relu") else (x,), save_output=function.startswith("relu")
    )
    return square(r, out) if function == "relu2" else out


def square(r: Run, x: Tensor) -> Tensor:
    """``x.pow(2)``: its backward keeps x^1, 2 x^1 and the product alive together."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        power = r.new(g.elements, g.dtype, "pow")
        doubled = r.new(g.elements, g.dtype, "pow")
        out = r.new(g.elements, g.dtype, "pow backward")
        del power, doubled
        return [out]

    return r.op("pow", [x], x.elements, x.dtype, back, save=(x,))


def mean(r: Run, x: Tensor, rows: Size) -> Tensor:
    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(elements, g.dtype, "mean backward")]

    elements = x.elements
    return r.op("mean", [x], rows, x.dtype, back)


def rsqrt(r: Run, x: Tensor) -> Tensor:
    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        cubed = r.new(g.elements, g.dtype, "rsqrt")
        halved = r.new(g.elements, g.dtype, "rsqrt")
        out = r.new(g.elements, g.dtype, "rsqrt backward")
        del cubed, halved
        return [out]

    shifted = r.new(x.elements, x.dtype, "add")
    shifted.node = x.node
    out = r.op("rsqrt", [shifted], x.elements, x.dtype, back, save_output=True)
    del shifted
    return out


def rms_norm(r: Run, x: Tensor, rows: Size, w: Tensor | None, late: bool = False) -> Tensor:
    """Hugging Face's RMSNorm: in fp32, operation by operation; the weight multiplies in the type of the input, or (`late`) before the cast."""
    wide = cast(r, x, FP32)
    variance = mean(r, square(r, wide), rows)
    normal = multiply(r, wide, rsqrt(r, variance), "normalize")
    if w is None:
        return cast(r, normal, x.dtype)
    if late:
        return cast(r, multiply(r, normal, w, "norm weight"), x.dtype)
    out = cast(r, normal, x.dtype)
    return multiply(r, out, w, "norm weight")


def fused_norm(r: Run, x: Tensor, rows: Size, w: Tensor | None, b: Tensor | None, statistics: int, name: str = "layer norm") -> Tensor:
    """``layer_norm`` (two statistics a row) or a fused RMSNorm (one): saves its input and the statistics."""
    params = [t for t in (w, b) if t is not None]

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        gx = r.new(g.elements, g.dtype, f"{name} backward")
        return [gx, *(r.new(t.elements, t.dtype, f"{name} backward", "gradients") if t.needs_grad else None for t in params)]

    stats = [(rows, x.dtype)] * statistics
    return r.op(name, [x, *params], x.elements, x.dtype, back, save=[x, *params[:1]], extra=stats)


def rotary(r: Run, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """``x cos + rotate_half(x) sin`` as Hugging Face writes it: half is negated, concatenated, multiplied, added."""
    cos, sin = cos_sin
    dtype = max(x.dtype, cos.dtype)
    whole = x.elements
    half = tuple((s, c // 2) for s, c in whole)
    if not (r.recording and x.needs_grad):
        return _rotate(r, x, half, dtype)
    saved = [r.pack(cos), r.pack(sin)]
    out = _rotate(r, x, half, dtype)
    out.node = _rotary_nodes(r, x, whole, half, dtype, saved)
    return out


def _rotate(r: Run, x: Tensor, half: Size, dtype: int) -> Tensor:
    straight = r.like(x, "rotary", dtype)
    negative = r.new(half, x.dtype, "rotary")
    turned = r.like(x, "rotary")
    del negative
    product = r.like(x, "rotary", dtype)
    del turned
    out = r.like(x, "rotary", dtype)
    del product, straight
    return out


def _rotary_nodes(r: Run, x: Tensor, whole: Size, half: Size, dtype: int, saved: list[Any]) -> Node:
    """The gradient's way back: product with sin, its halves, their sum, product with cos, their sum."""

    def straight(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(whole, dtype, "rotary")]

    def turned(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        a = r.new(whole, dtype, "rotary")
        b = r.new(half, dtype, "rotary")
        second = r.new(whole, dtype, "rotary slice")
        del b
        first = r.new(whole, dtype, "rotary slice")
        del a
        total = r.new(whole, dtype, "add")
        del first, second
        return [total]

    def both(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [g, g]

    one = r.node("rotary cos", [x.node], [saved[0]], straight)
    two = r.node("rotary sin", [x.node], [saved[1]], turned)
    return r.node("rotary", [one, two], [], both)


def repeat_heads(r: Run, x: Tensor, whole: Size, view: bool = False) -> Tensor:
    """Key or value heads repeated to the number of query heads; a single head is only seen several times (`view`)."""
    if x.elements == whole:
        return x
    elements, dtype = x.elements, x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(elements, dtype, "sum over groups")]

    if not view:
        return r.op("repeat heads", [x], whole, dtype, back)
    node = r.node("repeat heads", [x.node], [], back) if r.recording and x.needs_grad else None
    return Expanded(whole, dtype, x.storage, node, x.elements)


def sdpa(r: Run, q: Tensor, k: Tensor, v: Tensor, out: Size, statistics: Size, kind: str, state: Size) -> Tensor:
    """Fused attention: saves its inputs, output, log-sum-exp and the state of the random generator."""
    shapes = [(t.elements, t.needs_grad) for t in (q, k, v)]
    dtype = q.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(e, dtype, f"{kind} attention backward") if wanted else None for e, wanted in shapes]

    extra = [(statistics, FP32), (state, 1)]
    return r.op(f"{kind} attention", [q, k, v], out, dtype, back, save=(q, k, v), save_output=True, extra=extra, cache="attention")


def eager_attention(r: Run, q: Tensor, k: Tensor, v: Tensor, out: Size, scores: Size, loose: tuple[bool, bool, bool]) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with every matrix in memory. A batched product copies an input that is `loose`: not contiguous by head."""
    dtype = q.dtype
    q2 = copied(r, q) if loose[0] else q
    k2 = copied(r, k) if loose[1] else k
    raw = batched(r, q2, k2, scores, "scores")
    del q2, k2
    scaled = scale(r, raw)
    del raw
    probabilities = softmax(r, scaled)
    weights = cast(r, probabilities, dtype)
    del probabilities, scaled
    values = batched(r, weights, copied(r, v) if loose[2] else v, out, "attention times values")
    del weights
    return copied(r, values, back=loose[0])


def copied(r: Run, x: Tensor, back: bool = False) -> Tensor:
    """``contiguous()`` of a transposed tensor; with `back` its gradient is copied as well."""
    elements, dtype = x.elements, x.dtype

    def run(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(elements, dtype, "contiguous") if back else g]

    return r.op("contiguous", [x], x.elements, x.dtype, run)


def rows(r: Run, x: Tensor) -> Tensor:
    """A projection seen by head: the gradient comes back by head and is copied into rows."""
    if not (r.recording and x.needs_grad):
        return x
    elements, dtype = x.elements, x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(elements, dtype, "contiguous")]

    return Tensor(elements, dtype, x.storage, r.node("view by head", [x.node], [], back))


def batched(r: Run, a: Tensor, b: Tensor, out: Size, name: str) -> Tensor:
    """A batched product of two activations: saves what the other's gradient needs."""
    shapes = [(t.elements, t.needs_grad) for t in (a, b)]
    dtype = a.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(e, dtype, f"{name} backward") if wanted else None for e, wanted in shapes]

    save = ([a] if b.needs_grad else []) + ([b] if a.needs_grad else [])
    return r.op(name, [a, b], out, dtype, back, save=save)


def softmax(r: Run, x: Tensor) -> Tensor:
    """``softmax(x, dtype=float32)``: a 16-bit input is copied first; saves its fp32 output."""

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(g.elements, FP32, "softmax backward")]

    wide = cast(r, x, FP32)
    return r.op("softmax", [wide], wide.elements, FP32, back, save_output=True)


def cross_entropy(r: Run, logits: Tensor, one: Size, labels: Size = ()) -> Tensor:
    """``cross_entropy(logits.float(), labels)``: keeps the fp32 log-softmax; backward has two more of its size at once. `labels`: how many are copied."""
    wide = cast(r, logits, FP32)
    wanted = [r.new(labels, 8, "labels")] if labels else []
    wide_elements = wide.elements

    def log_softmax_back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(g.elements, FP32, "log-softmax backward", "logits")]

    def nll_back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(wide_elements, FP32, "loss backward", "logits")]

    logp = r.op("log-softmax", [wide], wide.elements, FP32, log_softmax_back, save_output=True, part="logits")
    return r.op("loss", [logp], one, FP32, nll_back, save=[logp, *wanted], extra=[(one, FP32)])


def fused_loss(r: Run, x: Tensor, w: Tensor, one: Size) -> Tensor:
    """PyTorch's ``linear_cross_entropy`` in pieces: makes the gradients of input and weight in forward, in the type of the input, and keeps them alone. They
    are outputs to autograd, which makes zeros for the gradients that nobody sends back to them.

    What it needs inside, a piece of logits no larger than the input, is the kernel's own.
    """
    made = [
        r.new(t.elements, x.dtype, what, part)
        for t, what, part in ((x, "input gradient", "activations"), (w, "weight gradient", "gradients"))
        if t.needs_grad
    ]
    wanted = [t.needs_grad for t in (x, w)]

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        left = list(saved)
        saved.clear()
        zeros = [r.new(t.elements, t.dtype, "zeros") for t in left]
        del zeros
        return [left.pop(0) if wants else None for wants in wanted]

    out = r.new(one, x.dtype, "loss")
    out.node = r.node("fused loss", [x.node, w.node], made, back)
    return cast(r, out, FP32)
