"""One training step on the tape: forward, backward, optimizer, for a few layers of a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..memory_table import PARTS
from . import ops
from .blocks import run_block
from .checkpoint import checkpoint, selective_cache
from .machine import PART, Storage, Tensor, padded
from .modules import Modules
from .optimizer import step_optimizer
from .owned import ENDS_AFTER, ENDS_BEFORE
from .sizes import times


class Step(Modules):
    """A replay of one step; `tape` has its moments afterwards."""

    after = ENDS_AFTER

    def replay(self) -> None:
        """A step with states in place: micro-batches, then the optimizer."""
        inputs = self._inputs()
        self.tape.mark("owned")
        self._accumulated()
        self.layer_copies = [np.zeros_like(self.tape.live) for _ in (*self.layers, "ends")]
        self.run.keeps_copies = self.setup.stage.piped
        if self.fsdp is not None:
            self.fsdp.piped = self.setup.stage.piped
            self.fsdp.reduce_now = not self.fsdp.piped
        self._hook_gradients()
        sent = self._sent()
        self._micro_batch()
        sent.clear()
        self._end_of_backward()
        if self.fsdp is not None and self.fsdp.piped:
            self.fsdp.reduce_all()
        self._end_autocast("uncast")
        self.stage_output = self.stage_input = None
        self.tape.mark("after backward")
        self._optimizer()
        del inputs

    def _inputs(self) -> list[Storage]:
        """Ids, labels and positions; on a pipeline rank of every micro-batch, beside the buffers that receive activations and gradients."""
        s, stage, tape = self.symbols, self.setup.stage, self.tape
        positions = Storage(tape, s.positions(8), PART["activations"], "positions")
        if not stage.piped:
            return [positions, Storage(tape, s.tokens(16), PART["activations"], "ids and labels")]
        width = self.setup.model.hidden * self.setup.types.stream
        kept = [positions, Storage(tape, s.every_microbatch(16), PART["activations"], "ids and labels")]
        for end, what in ((stage.first, "received activations"), (stage.last, "received gradients")):
            kept.append(Storage(tape, s.received(width, end), PART["communication_buffers"], what))
        return kept

    def _accumulated(self) -> None:
        """Gradients of earlier micro-batches: the replay is of the last one. A pipeline stage is taken in its steady state."""
        s, fsdp, tape = self.symbols, self.fsdp, self.tape
        self.layer_accumulated: list[NDArray[np.int64]] = []
        if self.setup.job.optimizer_in_backward:
            self.layer_accumulated = [np.zeros_like(tape.live) for _ in self.layers]
            return
        tape.at("forward", ENDS_BEFORE)
        piped = self.setup.stage.piped
        for params, group in [(self.root, self.root_group), *zip(self.layer_params, self.layer_groups)]:
            before = tape.live.copy()
            for p in params.values():
                if not p.trained:
                    continue
                cast = fsdp is not None and fsdp.reduce_cast
                size = times(p.grad_elements, fsdp.reduce if fsdp is not None and cast else p.dtype)
                size = s.when(size, "accumulating")
                p.accumulated = Storage(tape, size, PART["gradients"], "accumulated gradient")
            if group is not None and piped:  # kept whole from backward to the next micro-batch's forward
                group.unshard()
                group.wait(forward=False)
            if group is not None and fsdp is not None and fsdp.reduce_each and not piped:
                group.keep_shards()
            self.layer_accumulated.append(tape.since(before))
        self.layer_accumulated.pop(0)

    def _sent(self) -> list[Storage]:
        """The input gradient of the micro-batch before, which a pipeline stage keeps until it is sent (GPipe's loop gives it up at once)."""
        if not self.setup.stage.piped or self.setup.stage.first or self.setup.structure.schedule == "gpipe":
            return []
        size = self.symbols.when(self.symbols.sequence(self.setup.model.hidden * self.setup.types.stream), "accumulating")
        return [Storage(self.tape, size, PART["communication_buffers"], "input gradient being sent")]

    def _end_of_backward(self) -> None:
        if not self._buckets or self.setup.job.optimizer_in_backward:
            return
        for layer, params in [(ENDS_BEFORE, self.root), *enumerate(self.layer_params)]:
            self.tape.at("finish", layer)
            for p in params.values():
                p.accumulated = None
            self.tape.touch("end of backward")

    def _micro_batch(self) -> None:
        tape = self.tape
        before = tape.live.copy()
        tape.at("forward", ENDS_BEFORE)
        loss = self._forward()
        if self.fsdp is not None:
            self.fsdp.end_of_forward()
        self.tables.clear()
        if self.setup.stage.piped:  # whose schedule runs in one context from the first micro-batch to the last
            self.layer_copies = self._copies_of_layers()
        else:
            self._end_autocast("autocast")
        if self.setup.stage.piped and not self.setup.stage.last:
            self.stage_output = loss.view()
        tape.mark("after forward")
        tape.marks["saved"] = tape.since(before) - sum(self.layer_copies[:-1], padded(self.layer_copies[-1], len(tape.live)))
        tape.at("backward", ENDS_AFTER)
        seed = self.run.new(loss.elements, loss.dtype, "seed") if self.setup.stage.last else Tensor(loss.elements, loss.dtype, None)
        self.run.backward(loss, seed)
        del seed, loss
        if self.fsdp is not None:
            tape.at("backward", ENDS_BEFORE)
            self.fsdp.end_of_backward()

    def _copies_of_layers(self) -> list[NDArray[np.int64]]:
        """Autocast's copies of each layer's weights, and last those of the ends: one of each for all micro-batches in flight."""
        found = [np.zeros_like(self.tape.live) for _ in (*self.layers, "ends")]
        for p in self.parameters():
            if (copy := self.run.copies.get(id(p))) is not None and copy.storage is not None:
                for symbol, count in copy.storage.size:
                    found[p.layer if p.layer >= 0 else -1][symbol * len(PARTS) + copy.storage.part] += count
        return found

    def _end_autocast(self, phase: str) -> None:
        """Copies that nothing saved (biases), or no longer, go when the context ends."""
        if not self.run.copies:
            return
        by_layer: dict[int, list[Tensor]] = {}
        for p in self.parameters():
            copy = self.run.copies.pop(id(p), None)
            if copy is not None:
                by_layer.setdefault(p.layer, []).append(copy)
            del copy
        for layer in sorted(by_layer):
            self.tape.at(phase, layer)
            del by_layer[layer]
            self.tape.touch("end of autocast")

    def _forward(self) -> Tensor:
        run, fsdp, stage = self.run, self.fsdp, self.setup.stage
        run.layer = ENDS_BEFORE
        if fsdp is not None and self.root_group is not None:
            self.root_group.pre_forward()
        self._make_tables()
        with self.tape.leaving("embedding"):
            x = self._embed() if stage.first else self.received()
        tables = [op for op in self.setup.model.embedding if op.kind == "embedding"]
        # transformers' models keep `inputs_embeds` until they return, where nothing is added to it
        whole = [x.view()] if stage.first and not stage.piped and len(tables) == 1 else []
        every = self.setup.structure.recompute_every if self.setup.structure.recompute == "full" else 1
        for first in range(0, len(self.layers), every):
            x = self._span(first, min(first + every, len(self.layers)), x)
        run.layer = ENDS_AFTER
        self.tape.at("forward", ENDS_AFTER)
        ends = [x]
        del x  # the head gives it up with the final norm's input
        with self.tape.leaving("head"):
            out = self._head(ends.pop(), whole) if stage.last else ends.pop()
        if fsdp is not None and self.root_group is not None and not (stage.piped and stage.last):
            fsdp.leave(self.root_group, out)
        return out

    def _span(self, first: int, end: int, x: Tensor) -> Tensor:
        """Layers first .. end-1, which one checkpoint may span."""
        structure = self.setup.structure
        whole = structure.recompute == "full"
        by_op = structure.recompute == "selective" and not structure.recompute_modules
        tables = self._layer_tables()
        if end - first > 1:
            self.run.layer = first
            self.tape.at("forward", first)

            def span(x: Tensor) -> Tensor:
                for i in range(first, end):
                    self.run.layer = first if self.run.recomputing else i
                    x = self._wrapped(i, x, lambda x, i=i: self._layer(i, x, tables))  # type: ignore[misc]
                return x

            return checkpoint(self.run, span, [x])
        self.run.layer = first
        self.tape.at("forward", first)

        def one(x: Tensor) -> Tensor:
            return self._layer(first, x, tables)

        def saved(x: Tensor) -> Tensor:
            return checkpoint(self.run, one, [x], selective_cache() if by_op else None) if whole or by_op else one(x)

        return self._wrapped(first, x, saved)

    def _wrapped(self, i: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A layer inside what FSDP2 does before and after it."""
        group = self.layer_groups[i]
        if self.fsdp is None or group is None:
            return function(x)
        out = function(self.fsdp.enter(group, x))
        self.fsdp.leave(group, out)
        return out

    def _layer(self, i: int, x: Tensor, tables: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        outer, self.tables = self.tables, tables
        try:
            return run_block(self, self.layers[i], self.layer_params[i], x)
        finally:
            self.tables = outer

    def _layer_tables(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What a layer gets: FSDP2 with mixed precision casts fp32 tables for each layer anew (`cast_forward_inputs`)."""
        if not self.setup.types.mixed:
            return dict(self.tables)
        compute = self.setup.types.compute
        return {d: (ops.cast(self.run, c, compute), ops.cast(self.run, s, compute)) for d, (c, s) in self.tables.items()}

    def _optimizer(self) -> None:
        self.tape.at("optimizer", ENDS_BEFORE)
        self.tape.touch("optimizer")
        if not self.setup.job.optimizer_in_backward:
            step_optimizer(self)
