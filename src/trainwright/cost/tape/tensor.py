"""DTensor's collectives of tensor and sequence parallelism on the tape.

A functional collective allocates its result, and waiting for it makes another tensor (under fake tensors, as traces show). Gathering along
the sequence of a batch of more than one concatenates the parts once more; scattering always lays its input out anew first.
"""

from __future__ import annotations

from typing import Any

from .machine import Run, Tensor
from .ops import FP32
from .sizes import Size

BUFFER = "communication_buffers"


def _wait(r: Run, elements: Size, dtype: int, name: str, part: str) -> Tensor:
    made = r.new(elements, dtype, name, BUFFER)
    out = r.new(elements, dtype, name, part)
    del made
    return out


def _gathered(r: Run, elements: Size, dtype: int, join: Size, part: str) -> Tensor:
    """`join`: elements of the buffer that is there besides where parts have to be joined."""
    made = r.new(elements, dtype, "all-gather", BUFFER)
    before = r.new(join, dtype, "all-gather", BUFFER)
    out = r.new(elements, dtype, "all-gather", part)
    del before, made
    return out


def _scattered(r: Run, whole: Size, part_of_it: Size, dtype: int) -> Tensor:
    laid_out = r.new(whole, dtype, "reduce-scatter input", BUFFER)

    def make() -> list[Tensor]:
        return [r.new(part_of_it, dtype, "reduce-scatter", BUFFER)]

    (made,) = make() if r.caching is None else r.caching.outputs("reduce_scatter", make)
    out = r.new(part_of_it, dtype, "reduce-scatter")
    del laid_out, made
    return out


def _with(r: Run, x: Tensor, out: Tensor, name: str, back: Any) -> Tensor:
    if r.recording and x.needs_grad:
        out.node = r.node(name, [x.node], [], back)
    return out


def reduce_output(r: Run, x: Tensor) -> Tensor:
    """A row-parallel product's partial sums, added up; the gradient passes."""
    return _with(r, x, _wait(r, x.elements, x.dtype, "all-reduce", "activations"), "all-reduce", lambda r, saved, g: [g])


def reduce_gradient(r: Run, x: Tensor) -> Tensor:
    """A column-parallel product's input: nothing forward, its gradient is added up."""
    if not (r.recording and x.needs_grad):
        return x

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [_wait(r, g.elements, g.dtype, "all-reduce", "activations")]

    return Tensor(x.elements, x.dtype, x.storage, r.node("all-reduce", [x.node], [], back))


def gather(r: Run, x: Tensor, whole: Size, join: Size) -> Tensor:
    """The sequence region made whole in front of a column-parallel product; the gradient is reduced and scattered."""
    part_of_it, dtype = x.elements, x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [_scattered(r, whole, part_of_it, dtype)]

    return _with(r, x, _gathered(r, whole, dtype, join, "activations"), "reduce-scatter", back)


def scatter(r: Run, x: Tensor, part_of_it: Size, join: Size) -> Tensor:
    """A row-parallel product's partial sums, added up and cut along the sequence; the gradient is gathered."""
    whole, dtype = x.elements, x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [_gathered(r, whole, dtype, join, "activations")]

    return _with(r, x, _scattered(r, whole, part_of_it, dtype), "all-gather", back)


def gather_logits(r: Run, x: Tensor, whole: Size) -> Tensor:
    """Logits of every rank side by side; each keeps its part of their gradient."""
    part_of_it, dtype = x.elements, x.dtype

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [r.new(part_of_it, dtype, "local logits gradient", "logits")]

    return _with(r, x, _gathered(r, whole, dtype, whole, "logits"), "logits", back)


def vocab_parallel_loss(r: Run, logits: Tensor, rows: Size, one: Size) -> Tensor:
    """``loss_parallel``: log-softmax over vocabulary shards with three small all-reduces; backward in one handler.

    Backward holds zeros, exponentials and their sum at once beside the saved log-softmax, and 33 bytes a token of targets, masks and
    indices.
    """
    dtype, elements = logits.dtype, logits.elements

    def cast_back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        return [g if dtype == FP32 else r.new(elements, dtype, "cast", "logits")]

    def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
        scalar = r.new(one, FP32, "loss gradient")
        zeros = r.new(elements, FP32, "zeros", "logits")
        small = r.new(rows, 33, "targets and masks", "logits")
        powers = r.new(elements, FP32, "exp", "logits")
        added = r.new(elements, FP32, "gradient", "logits")
        del powers
        out = r.new(elements, FP32, "loss backward", "logits")
        del added, small, zeros, scalar
        return [out]

    wide = logits if dtype == FP32 else r.op("cast", [logits], elements, FP32, cast_back, part="logits")
    shifted = r.new(elements, FP32, "shifted logits", "logits")
    powers = r.new(elements, FP32, "exp", "logits")
    del powers
    statistics = r.new(rows, 12, "softmax statistics", "logits")
    out = r.op("log-softmax", [wide], elements, FP32, back, save_output=True, part="logits")
    del shifted, statistics
    return r.op("loss", [out], one, FP32, lambda r, saved, g: [g], extra=[(one, FP32)])
