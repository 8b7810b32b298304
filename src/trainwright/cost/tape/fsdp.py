"""FSDP2 (``fully_shard``) on the tape: groups that gather before use, free after, and reduce in backward.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py); the order of
allocations follows it.
"""

from __future__ import annotations

from typing import Any

from .machine import PART, Node, Parameter, Run, Storage, Tensor
from .sizes import Symbols, plus, times


class Group:
    """The parameters that one ``fully_shard`` call gathers together: a layer, or the root (embedding, final norm, head)."""

    def __init__(self, fsdp: Fsdp, name: str, layer: int, params: list[Parameter], *, reshard: bool) -> None:
        self.fsdp, self.name, self.layer, self.params, self.reshard_after_forward = fsdp, name, layer, params, reshard
        weights = [p.weight for p in params]
        trained = [p.weight for p in params if p.trained]
        s = fsdp.symbols
        self.shard, self.padded = s.shard(weights), s.padded(weights)
        self.reduce_shard, self.reduce_padded = (s.shard(trained), s.padded(trained)) if trained else ((), ())
        self.whole: list[Storage] = []
        self.gathered: Storage | None = None
        self.state = "idle"
        self.order: list[int] = []
        self.reduced_buffer: Storage | None = None
        for p in params:
            p.group = self

    def unshard(self) -> None:
        f = self.fsdp
        if self.gathered is not None or self.whole:
            return
        if not f.sharded:  # replicate(): nothing to gather, `wait` copies
            self.gathered = Storage(f.tape, (), PART["communication_buffers"], "")
            return
        cast = Storage(f.tape, times(self.shard, f.compute), PART["communication_buffers"], "shard cast") if f.mixed else None
        self.gathered = Storage(f.tape, times(self.padded, f.compute), PART["communication_buffers"], f"all-gather of {self.name}")
        del cast

    def wait(self, forward: bool) -> None:
        f = self.fsdp
        if self.gathered is None:
            return
        previous = f.kept if forward else None
        if forward:
            f.kept = None
        copy, pieces = None, []
        for p in self.params:
            size = times(f.symbols.padded([p.weight]), f.compute)
            if f.mixed and not f.sharded:
                copy = Storage(f.tape, size, PART["communication_buffers"], "parameter cast")
            self.whole.append(Storage(f.tape, size, PART["parameters"], f"unsharded {self.name}"))
            if f.sharded and _is_stack(p):  # pieces of every expert, joined once all are there
                pieces.append(
                    Storage(f.tape, f.symbols.cut(size, p.weight, within=True), PART["communication_buffers"], "pieces of experts")
                )
        del copy
        pieces.clear()
        if forward and f.sharded:
            f.kept = self.gathered
        self.gathered = None
        del previous

    def reshard(self) -> None:
        while self.whole:
            self.whole.pop(0)

    # hooks

    def pre_forward(self) -> None:
        self.state = "forward"
        self.unshard()
        self.wait(forward=True)

    def post_forward(self) -> None:
        if self.reshard_after_forward:
            self.reshard()
        self.order.append(len(self.fsdp.forward_order))
        self.fsdp.forward_order.append(self)
        self.state = "idle"

    def before_recomputation(self) -> None:
        """A checkpoint around several groups runs forward again: those whose backward has not begun gather as in a forward pass."""
        began = self.state == "pre_backward"
        if not began:
            self.state = "forward"
        self.unshard()
        self.wait(forward=not began)

    def after_recomputation(self) -> None:
        """They stay gathered for their backward; each is the root of its own forward pass, so its buffer goes."""
        if self.state == "forward":
            self.fsdp.kept = None
            self.state = "idle"

    def pre_backward(self) -> None:
        if self.state == "pre_backward":
            return
        self.state = "pre_backward"
        self.unshard()
        self.wait(forward=False)
        if self.order and (target := self.order.pop() - 1) >= 0:
            self.fsdp.forward_order[target].unshard()

    def post_backward(self) -> None:
        self.state = "post_backward"
        if not self.fsdp.reduce_now:
            if not self.fsdp.piped:
                self.reshard()
            self._accumulate()
            return
        grads: list[Any] = []
        stacks: list[tuple[Parameter, Any]] = []
        if self.fsdp.reduce_cast:
            for p in self.params:
                shrink(self.fsdp.symbols, p)  # with accumulation a gradient is added to the kept one, in place
        for p in self.params:
            if p.grad is not None or p.accumulated is not None:
                grads.append(self._local(p))
                stacks += [(p, grads[-1])] * (_is_stack(p) and self.fsdp.sharded)
                p.grad = p.accumulated = None
        self.reshard()
        self.fsdp.reduce_states.clear()
        if grads:
            self._reduce(grads, stacks)

    def _local(self, p: Parameter) -> Any:
        """What is reduced: a gradient and what it was added to; of a split table's whole gradient its own part is copied out."""
        if p.grad_elements == p.elements:
            return (p.grad, p.accumulated)
        f, s = self.fsdp, self.fsdp.symbols
        once = s.when(times(p.elements, f.compute), "one micro-batch")
        kept = s.when(times(p.elements, f.reduce if f.reduce_cast else f.compute), "accumulating")
        part = PART["gradients"]
        return (Storage(f.tape, once, part, "local gradient"), Storage(f.tape, kept, part, "local gradient"))

    def _accumulate(self) -> None:
        """Without synchronization gradients are added to those of earlier micro-batches, in the reduce type."""
        if self.fsdp.reduce_cast:
            for p in self.params:
                if p.accumulated is not None:  # the first micro-batch makes it
                    p.accumulated.become(times(p.grad_elements, self.fsdp.reduce))
                p.grad = None

    def _reduce(self, grads: list[Any], stacks: list[tuple[Parameter, Any]]) -> None:
        f = self.fsdp
        copies = self._rearranged(stacks)
        part = PART["communication_buffers"]
        # PyTorch's loop variable: the last gradient outlives the list, but not the summed one of a replicated pipeline stage, where no loop runs.
        last = grads[-1] if f.sharded or not f.piped else None
        self.reduced_buffer = None
        source = Storage(f.tape, times(self.reduce_padded, f.reduce), part, f"reduce-scatter of {self.name}")
        while grads:
            grads.pop(0)
        if stacks and stacks[-1][1] is not last:
            self._leave(*stacks[-1], within=True)
        copies.clear()
        kept = PART["gradients"]
        out = Storage(f.tape, times(self.reduce_shard, f.reduce), kept if f.reduce == f.stored else part, "reduced shard")
        if f.reduce != f.stored:
            narrow = out
            out = Storage(f.tape, times(self.reduce_shard, f.stored), kept, "gradient shard")
            if f.sharded:  # kept where replicas all-reduce it
                narrow.become(f.symbols.when(narrow.size, "replicas"))
            self.reduced_buffer = narrow
            del narrow
        if f.reduce_each and not f.piped:  # added in place to the shards of earlier micro-batches, then gone
            out.become(f.symbols.when(out.size, "first shards"))
        if not f.uses_each:
            f.sharded_grads.append(out)
        f.reduce_states.append(source)
        del last
        stacks.clear()

    def _rearranged(self, stacks: list[tuple[Parameter, Any]]) -> list[Storage]:
        """Gradients of stacks that are cut within their experts, copied rank after rank; PyTorch's loop variable keeps the last one's own."""
        f, copies = self.fsdp, list[Storage]()
        for i, (p, grad) in enumerate(stacks):
            if i:
                self._leave(*stacks[i - 1], within=False)
            size = plus(*(f.symbols.cut(s.size, p.weight, within=True) for s in _storages(grad)))
            copies.append(Storage(f.tape, size, PART["gradients"], "gradient rank after rank"))
        return copies

    def _leave(self, p: Parameter, grad: Any, *, within: bool) -> None:
        """From here on a gradient is there only where its stack is cut within its experts, or only where it is not."""
        for s in _storages(grad):
            s.become(self.fsdp.symbols.cut(s.size, p.weight, within=within))

    def keep_shards(self) -> None:
        """The gradient shards that earlier micro-batches left."""
        f = self.fsdp
        size = f.symbols.when(times(self.reduce_shard, f.stored), "adding to shards")
        f.sharded_grads.append(Storage(f.tape, size, PART["gradients"], "gradient shard"))

    def finish(self) -> None:
        self.reduced_buffer = None
        self.order.clear()


def _is_stack(p: Parameter) -> bool:
    return len(p.weight.shape) > 2


def _storages(grad: Any) -> list[Storage]:
    """Of a gradient and what it was added to."""
    made, kept = grad
    return [s for s in (made and made.storage, kept) if s is not None]


def shrink(s: Symbols, p: Parameter) -> None:
    """A new gradient that a plan with accumulation adds to the kept one is gone there."""
    if p.grad is not None and p.grad.storage is not None:
        p.grad.storage.become(s.when(p.grad.storage.size, "one micro-batch"))


class Fsdp:
    """All groups of a model and what they share."""

    def __init__(
        self,
        run: Run,
        symbols: Symbols,
        *,
        compute: int,
        stored: int,
        reduce: int,
        sharded: bool,
        reduce_each: bool = False,
        uses_each: bool = False,
    ) -> None:
        self.run, self.tape, self.symbols = run, run.tape, symbols
        self.compute, self.stored, self.reduce = compute, stored, reduce
        self.mixed, self.reduce_cast = compute != stored, reduce != compute
        self.sharded = sharded
        self.groups: list[Group] = []
        self.forward_order: list[Group] = []
        self.kept: Storage | None = None
        self.reduce_states: list[Storage] = []
        self.sharded_grads: list[Any] = []
        self.reduce_now = True
        self.uses_each = uses_each  # an optimizer in backward steps with each reduced gradient, which is gone then
        self.reduce_each = reduce_each  # shards are kept between micro-batches, not whole gradients
        self.piped = False  # torch's pipeline stages reduce once, after their last micro-batch, and keep parameters whole until then

    def enter(self, group: Group, x: Tensor) -> Tensor:
        """Before a module's forward: gather, and watch for the gradient of its input."""
        if self.run.recomputing:
            group.before_recomputation()
            return x
        group.pre_forward()
        if not x.needs_grad or not self.run.recording:
            return x

        def back(r: Run, saved: list[Any], g: Tensor) -> list[Tensor | None]:
            group.post_backward()
            return [g]

        return Tensor(x.elements, x.dtype, x.storage, self.run.node(f"{group.name} done", [x.node], [], back))

    def leave(self, group: Group, out: Tensor) -> None:
        """After a module's forward: free or keep, and gather again before the gradient of its output is used."""
        if self.run.recomputing:
            group.after_recomputation()
            return
        group.post_forward()
        if isinstance(out.node, Node):
            out.node.before = [*(out.node.before or []), group.pre_backward]

    def reduce_all(self) -> None:
        """The reduction of a pipeline stage after its last micro-batch."""
        self.reduce_now = True
        for group in self.groups:
            group.state = "idle"
        self.end_of_backward("reduce")

    def end_of_forward(self) -> None:
        self.kept = None

    def end_of_backward(self, phase: str = "backward") -> None:
        """The final callback, root first: groups whose input wanted no gradient reduce now, then every buffer goes."""
        for group in self.groups:
            if group.state != "post_backward":
                self.tape.at(phase, group.layer)
                group.post_backward()
            group.state = "idle"
        for group in self.groups:  # after all of them: PyTorch does both group by group, which only a first layer without gradient can see
            if self.reduce_now and group.reduced_buffer is not None:
                self.tape.at("finish", group.layer)
                group.finish()
                self.tape.touch("end of backward")
            if self.reduce_now:
                group.finish()
        if self.reduce_now:
            self.reduce_states.clear()
        self.forward_order.clear()
