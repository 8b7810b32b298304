"""The tape: allocations and frees in the order in which PyTorch makes them, with sizes as symbols.

A `Storage` counts while something refers to it; Python's own reference counts do that bookkeeping, as they do in PyTorch: a tensor that a
local variable, a graph node or a buffer still holds is alive. `Tape` notes the live bytes whenever a free follows an allocation: only there
can a peak be.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory_table import PARTS
from .sizes import Size, times

PART = {name: i for i, name in enumerate(PARTS)}
ENDS = ("embedding", "head", "loss")  # marks of what the ends of a model save; the loss is a part of the head
EARLIER = 2**40  # what a node's number is less where an earlier micro-batch made it
Place = tuple[str, int, int]  # phase, layer (-1 before the layers, -2 after them), event number inside


class Tape:
    """Live bytes by (symbol, part) and the moments at which they were largest."""

    def __init__(self, named: bool = False) -> None:
        self.live = np.zeros(128 * len(PARTS), dtype=np.int64)
        self.moments: list[tuple[Place, str, NDArray[np.int64]]] = []
        self.marks: dict[str, NDArray[np.int64]] = {name: np.zeros_like(self.live) for name in ENDS}
        self.by_name: dict[tuple[str, int, int], int] | None = {} if named else None
        self.named: list[dict[tuple[str, int, int], int]] = []
        self._rising = False
        self._what = ""
        self._phase, self._layer = "load", -1
        self._counts: dict[tuple[str, int], int] = {}

    def at(self, phase: str, layer: int) -> None:
        """From here on events belong to this phase and layer."""
        if layer != self._layer or phase != self._phase:
            self.note()
            self._phase, self._layer = phase, layer

    def add(self, size: Size, part: int, what: str) -> None:
        for symbol, count in size:
            key = symbol * len(PARTS) + part
            if key >= len(self.live):
                self.live = np.concatenate([self.live, np.zeros_like(self.live)])
            self.live[key] += count
        self._rising, self._what = True, what
        if self.by_name is not None:
            self._name(size, part, what, 1)

    def remove(self, size: Size, part: int, what: str) -> None:
        if self._rising:
            self.note()
        for symbol, count in size:
            self.live[symbol * len(PARTS) + part] -= count
        if self.by_name is not None:
            self._name(size, part, what, -1)

    def replace(self, old: Size, new: Size, part: int, what: str) -> None:
        """A storage becomes smaller for some plans: no moment of its own."""
        self.remove(old, part, what)
        self.add(new, part, what)
        self._rising = False

    def touch(self, what: str) -> None:
        """A moment of its own, whether or not something was allocated."""
        self._rising, self._what = True, what
        self.note()

    def note(self) -> None:
        if not self._rising:
            return
        self._rising = False
        segment = (self._phase, self._layer)
        number = self._counts[segment] = self._counts.get(segment, 0) + 1
        self.moments.append(((*segment, number), self._what, self.live.copy()))
        if self.by_name is not None:
            self.named.append(dict(self.by_name))

    def since(self, before: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is alive now beyond an earlier copy of `live`."""
        return self.live - padded(before, len(self.live))

    def mark(self, name: str) -> None:
        """Keep what is alive now under a name."""
        self.marks[name] = self.live.copy()

    @contextmanager
    def leaving(self, name: str) -> Iterator[None]:
        """Add what is left alive to what a name has."""
        before = self.live.copy()
        yield
        self.marks[name] = padded(self.marks[name], len(self.live)) + self.since(before)

    def _name(self, size: Size, part: int, what: str, sign: int) -> None:
        names = self.by_name
        assert names is not None
        for symbol, count in size:
            key = (what, part, symbol)
            names[key] = names.get(key, 0) + sign * count
            if not names[key]:
                del names[key]


def padded(values: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The first `length` entries, zeros where there are fewer: the table of symbols grows while a step is replayed."""
    if len(values) >= length:
        return values[:length]
    return np.concatenate([values, np.zeros(length - len(values), dtype=np.int64)])


class Storage:
    """Bytes that are alive while this object is."""

    __slots__ = ("part", "size", "tape", "what")

    def __init__(self, tape: Tape, size: Size, part: int, what: str) -> None:
        self.tape, self.size, self.part, self.what = tape, size, part, what
        tape.add(size, part, what)

    def become(self, size: Size) -> None:
        """From now on only so large."""
        self.tape.replace(self.size, size, self.part, self.what)
        self.size = size

    def __del__(self) -> None:
        self.tape.remove(self.size, self.part, self.what)


class Tensor:
    """A value of the forward pass or a gradient. `storage` None: its bytes are somebody else's (an owned parameter, an input)."""

    __slots__ = ("dtype", "elements", "node", "storage")

    def __init__(self, elements: Size, dtype: int, storage: Storage | None, node: Node | Parameter | None = None) -> None:
        self.elements, self.dtype, self.storage, self.node = elements, dtype, storage, node

    @property
    def needs_grad(self) -> bool:
        return self.node is not None

    def view(self) -> Tensor:
        """The same storage without history: what a node saves."""
        return Tensor(self.elements, self.dtype, self.storage)

    def reshaped(self, elements: Size) -> Tensor:
        return Tensor(elements, self.dtype, self.storage, self.node)


class Parameter:
    """A leaf. `grad` is what accumulation leaves; `uses` is how many gradients this backward pass will still deliver."""

    __slots__ = (
        "_pending",
        "accumulated",
        "dtype",
        "elements",
        "grad",
        "grad_elements",
        "group",
        "layer",
        "name",
        "on_grad",
        "trained",
        "uses",
        "weight",
    )

    def __init__(self, name: str, elements: Size, dtype: int, trained: bool, weight: Any = None) -> None:
        self.name, self.elements, self.dtype, self.trained, self.weight = name, elements, dtype, trained, weight
        self.grad_elements = elements  # a split table's gradient is whole
        self.grad: Tensor | None = None
        self.accumulated: Storage | None = None  # the gradient of earlier micro-batches, where a plan has them
        self.group: Any = None
        self.layer = -1
        self.uses = 0
        self.on_grad: Callable[[Parameter], None] | None = None
        self._pending: Tensor | None = None

    def tensor(self) -> Tensor:
        return Tensor(self.elements, self.dtype, None, self if self.trained else None)


Backward = Callable[["Run", "list[Any]", Tensor], Sequence["Tensor | None"]]


class Node:
    """A step of the backward pass; `edges` go to the nodes or parameters of its inputs (None where no gradient is wanted)."""

    __slots__ = ("before", "buffer", "edges", "layer", "name", "run", "saved", "seq")

    def __init__(self, seq: int, name: str, edges: list[Node | Parameter | None], saved: list[Any], run: Backward, layer: int) -> None:
        self.seq, self.name, self.edges, self.saved, self.run, self.layer = seq, name, edges, saved, run, layer
        self.buffer: Tensor | None = None
        self.before: list[Callable[[], None]] | None = None


class Run:
    """One training step being replayed: makes tensors and nodes, packs what nodes save, and runs the backward pass.

    `pack` is replaced while a checkpointed region runs (see `checkpoint`).
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.seq = 0
        self.layer = -1
        self.pack: Callable[[Tensor], Any] = lambda t: t
        self.recording = True
        self.recomputing = False
        self.copies: dict[int, Tensor] = {}  # autocast's 16-bit copies of parameters, until its context ends
        self.keeps_copies = False  # that context is around backward too
        self.caching: Any = None  # an op-selective checkpoint that keeps or returns outputs

    # storage

    def new(self, elements: Size, dtype: int, what: str, part: str = "activations") -> Tensor:
        return Tensor(elements, dtype, Storage(self.tape, times(elements, dtype), PART[part], what))

    def like(self, t: Tensor, what: str, dtype: int | None = None) -> Tensor:
        return self.new(t.elements, dtype or t.dtype, what, PARTS[t.storage.part] if t.storage is not None else "activations")

    # forward

    def op(
        self,
        name: str,
        inputs: Sequence[Tensor],
        elements: Size,
        dtype: int,
        run: Backward,
        *,
        save: Sequence[Tensor] = (),
        save_output: bool = False,
        extra: Sequence[tuple[Size, int]] = (),
        part: str = "activations",
        cache: str = "",
    ) -> Tensor:
        """One operation: saves inputs, allocates the output (and `extra` outputs that are saved too), saves the output.

        `cache` names the kind of operation for an op-selective checkpoint, which may keep its outputs.
        """
        wanted = self.recording and any(t.needs_grad for t in inputs)
        saved = [self.pack(t.view()) for t in save] if wanted else []

        def make() -> list[Tensor]:
            return [self.new(elements, dtype, name, part), *(self.new(size, d, name, part) for size, d in extra)]

        out, *more = make() if self.caching is None or not cache else self.caching.outputs(cache, make)
        if wanted:
            saved += [self.pack(t.view()) for t in ([out] if save_output else []) + more]
            out.node = self.node(name, [t.node for t in inputs], saved, run)
        return out

    def node(self, name: str, edges: Sequence[Node | Parameter | None], saved: list[Any], run: Backward) -> Node:
        self.seq += 1
        return Node(self.seq, name, list(edges), saved, run, self.layer)

    # backward

    def backward(self, root: Tensor, grad: Tensor) -> None:
        """Nodes by descending creation number; leaves at once, when the last gradient that they wait for is there."""
        if root.node is None:  # nothing before it is trained: a first stage that is a frozen embedding alone
            return
        assert isinstance(root.node, Node)
        self._count_uses(root.node)
        heap: list[tuple[int, int, Node]] = []
        self._deliver(root.node, grad, heap)
        del grad
        while heap:
            node = heapq.heappop(heap)[2]
            self.tape.at("backward" if node.seq > 0 else "casting", node.layer)
            for hook in node.before or ():
                hook()
            outputs = self._call(node)
            node.saved = []
            for i, edge in enumerate(node.edges):
                out, outputs[i] = outputs[i], None
                if edge is not None and out is not None:
                    self._deliver(edge, out, heap)
                del out
            node.edges = []

    def _call(self, node: Node) -> list[Tensor | None]:
        grad = node.buffer
        node.buffer = None
        assert grad is not None
        return list(node.run(self, [s.unpack() if hasattr(s, "unpack") else s for s in node.saved], grad))

    def _deliver(self, edge: Node | Parameter, grad: Tensor, heap: list[tuple[int, int, Node]]) -> None:
        if isinstance(edge, Parameter):
            edge._pending = grad if edge._pending is None else self.add(edge._pending, grad)
            edge.uses -= 1
            if edge.uses <= 0:
                self._accumulate(edge)
            return
        if edge.buffer is None:
            edge.buffer = grad
            heapq.heappush(heap, (-edge.seq, id(edge), edge))
        else:
            edge.buffer = self.add(edge.buffer, grad)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A second gradient is added out of place: three tensors are alive. Of one that is whole where the first is a part, its part is copied out."""
        part = self.like(a, "local gradient") if b.elements != a.elements else None
        made = self.like(a, "add")
        del part
        return made

    def _accumulate(self, p: Parameter) -> None:
        pending, p._pending = p._pending, None
        p.grad = pending
        del pending
        if p.on_grad is not None:
            p.on_grad(p)

    @staticmethod
    def _count_uses(root: Node) -> None:
        seen = {id(root)}
        stack = [root]
        while stack:
            for edge in stack.pop().edges:
                if isinstance(edge, Parameter):
                    edge.uses += 1
                elif edge is not None and id(edge) not in seen:
                    seen.add(id(edge))
                    stack.append(edge)


def release(items: Iterable[Any]) -> None:
    """Give up references in order, one at a time."""
    for _ in items:
        pass
