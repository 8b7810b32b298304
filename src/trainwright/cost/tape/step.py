"""One training step on the tape: forward, backward, optimizer, for a few layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec.blocks import Block, Op, Weight
from ...spec.optimizer import OPTIMIZERS
from . import ops, tensor
from .blocks import WIDE_ROTARY, run_block
from .checkpoint import checkpoint, selective_cache
from .fsdp import Fsdp, Group, shrink
from .machine import PART, Parameter, Run, Storage, Tape, Tensor
from .math_attention import math_attention
from .optimizer import step_optimizer
from .setup import Setup, reduces_every_micro_batch
from .sizes import Size, Symbols, times

ENDS_BEFORE, ENDS_AFTER = -1, 1 << 20


class Step:
    """Owns the tape and everything that lives through a step. `layers` are the blocks to replay, first to last."""

    def __init__(self, setup: Setup, layers: list[Block], named: bool = False) -> None:
        self.setup, self.layers = setup, layers
        v = setup.variant
        self.symbols = Symbols(tensor_parallel=v.tensor, sequence_parallel=setup.structure.sequence_parallel)
        self.tape = Tape(named)
        self.run = Run(self.tape)
        self.owned: list[Storage] = []
        self.fsdp: Fsdp | None = None
        if setup.fsdp:
            self.fsdp = Fsdp(
                self.run,
                self.symbols,
                compute=setup.unsharded_dtype,
                stored=setup.stored,
                reduce=setup.reduce if setup.mixed else setup.stored,
                sharded=setup.sharded,
                reduce_each=reduces_every_micro_batch(setup.structure),
            )
        self.root: dict[str, Parameter] = {}
        self.layer_params: list[dict[str, Parameter]] = []
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.stage_output: Tensor | None = None
        self._make_parameters()

    after = ENDS_AFTER

    # what is owned

    def _make_parameters(self) -> None:
        stage = self.setup.stage
        ends = ([self.setup.model.embedding] if stage.first else []) + ([self.setup.model.head] if stage.last else [])
        self.root = {}
        for block in ends:
            self.root |= self._parameters(block, ENDS_BEFORE)
        if stage.last and not stage.first and self.setup.model.tied:
            table = self.setup.model.embedding.ops[0]
            self.root |= {w.name: self._parameter(w.name, w, not self.setup.lora, ENDS_BEFORE) for w in table.weights[:1]}
        self.layer_params = [self._parameters(block, i) for i, block in enumerate(self.layers)]
        self.root_group = self._own("root", ENDS_BEFORE, self.root)
        self.layer_groups: list[Group | None] = []
        self.layer_owned: list[NDArray[np.int64]] = []
        for i, params in enumerate(self.layer_params):
            before = self.tape.live.copy()
            self.layer_groups.append(self._own("layer", i, params))
            self.layer_owned.append(self.tape.since(before))
        if self.setup.structure.sharding == "zero1":
            size = self.symbols.zero_redundancy(
                OPTIMIZERS[self.setup.job.optimizer], self._all_trained(), 4 if self.setup.masters else self.setup.stored
            )
            self.owned.append(Storage(self.tape, size, PART["optimizer"], "optimizer states of rank 0"))
        buffers = self.setup.model.buffer_bytes
        if buffers:
            self.owned.append(Storage(self.tape, self.symbols.one(buffers), PART["parameters"], "buffers"))

    def _all_trained(self) -> list[Weight]:
        """Every trained tensor of the stage in order, not only those of the layers that are replayed."""
        model = self.setup.model
        blocks = [model.embedding, *(model.blocks[name] for name in self.setup.stage.layers), model.head]
        return [w for block in blocks for w, trained in self.setup.owned(block) if trained]

    def _parameters(self, block: Block, layer: int) -> dict[str, Parameter]:
        return {w.name: self._parameter(w.name, w, trained, layer) for w, trained in self.setup.owned(block)}

    def _parameter(self, name: str, w: Any, trained: bool, layer: int) -> Parameter:
        p = Parameter(name, self.symbols.local(w), self.setup.unsharded_dtype if self.fsdp else self.setup.stored, trained, w)
        p.layer = layer
        if layer < 0 and self.symbols.splits(w) is not None and any(w is x for op in self.setup.model.embedding for x in op.weights):
            p.grad_elements = self.symbols.one(w.elements)
        return p

    def _own(self, name: str, layer: int, params: dict[str, Parameter]) -> Group | None:
        """Owned bytes of a group of parameters: themselves, optimizer states, DDP's gradient buckets."""
        s, setup = self.symbols, self.setup
        weights = [p.weight for p in params.values()]
        trained = [p.weight for p in params.values() if p.trained]
        if not weights:
            return None
        count = s.shard if setup.sharded else _local(s)
        tape = self.tape
        self.owned.append(Storage(tape, times(count(weights), setup.stored), PART["parameters"], f"{name} parameters"))
        if setup.masters and trained:
            self.owned.append(Storage(tape, count(trained, 4), PART["master_weights"], f"{name} masters"))
        if not trained:
            return self._group(name, layer, params)
        if setup.ddp and setup.variant.data:
            self.owned.append(Storage(tape, count(trained, setup.stored), PART["gradients"], f"{name} gradient buckets"))
        if setup.structure.sharding != "zero1":
            size = s.optimizer(
                OPTIMIZERS[setup.job.optimizer], trained, setup.stored if not setup.masters else 4, setup.sharded, layer >= 0
            )
            self.owned.append(Storage(tape, size, PART["optimizer"], f"{name} optimizer states"))
        return self._group(name, layer, params)

    def _group(self, name: str, layer: int, params: dict[str, Parameter]) -> Group | None:
        if self.fsdp is None:
            return None
        zero3 = self.setup.structure.sharding == "zero3"
        reshard = zero3 and (layer >= 0 or self.setup.structure.reshard_root)
        group = Group(self.fsdp, name, layer, list(params.values()), reshard=reshard)
        self.fsdp.groups.append(group)
        return group

    # forward

    def replay(self) -> None:
        """A step with states in place: micro-batches, then the optimizer."""
        inputs = self._inputs()
        self.tape.mark("owned")
        self._accumulated()
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
        self.tape.mark("after backward")
        self._optimizer()
        del inputs

    def _inputs(self) -> list[Storage]:
        """Ids, labels and positions; on a pipeline rank of every micro-batch, beside the buffers that receive activations and gradients."""
        s, stage, tape = self.symbols, self.setup.stage, self.tape
        positions = Storage(tape, s.positions(8), PART["activations"], "positions")
        if not stage.piped:
            return [positions, Storage(tape, s.tokens(16), PART["activations"], "ids and labels")]
        width = self.setup.model.hidden * self._residual
        kept = [positions, Storage(tape, s.every_microbatch(16), PART["activations"], "ids and labels")]
        for wanted, what in ((not stage.first, "received activations"), (not stage.last, "received gradients")):
            if wanted:
                kept.append(Storage(tape, s.received(width), PART["communication_buffers"], what))
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
        size = self.symbols.when(self.symbols.sequence(self.setup.model.hidden * self._residual), "accumulating")
        return [Storage(self.tape, size, PART["communication_buffers"], "input gradient being sent")]

    def _hook_gradients(self) -> None:
        """DDP copies a finished gradient into its bucket; an optimizer in backward uses it and frees it; others are added to the kept
        one."""
        setup = self.setup
        for p in self.parameters():
            if setup.job.optimizer_in_backward:
                p.on_grad = _forget
            elif self._buckets:
                p.on_grad = self._to_bucket
            elif self.fsdp is None or not self.fsdp.reduce_cast:
                p.on_grad = self._shrink

    @property
    def _buckets(self) -> bool:
        return self.setup.ddp and self.setup.variant.data

    def _to_bucket(self, p: Parameter) -> None:
        """The last micro-batch's gradient goes into its bucket and what it was added to is free; in one between first and last that stays."""
        p.grad = None
        if p.accumulated is not None:
            p.accumulated.become(self.symbols.when(p.accumulated.size, "three micro-batches"))

    def _end_of_backward(self) -> None:
        if not self._buckets or self.setup.job.optimizer_in_backward:
            return
        for layer, params in [(ENDS_BEFORE, self.root), *enumerate(self.layer_params)]:
            self.tape.at("finish", layer)
            for p in params.values():
                p.accumulated = None
            self.tape.touch("end of backward")

    def _shrink(self, p: Parameter) -> None:
        shrink(self.symbols, p)

    def parameters(self) -> list[Parameter]:
        return [*self.root.values(), *(p for params in self.layer_params for p in params.values())]

    def _micro_batch(self) -> None:
        tape = self.tape
        before = tape.live.copy()
        tape.at("forward", ENDS_BEFORE)
        loss = self._forward()
        if self.fsdp is not None:
            self.fsdp.end_of_forward()
        self.tables.clear()
        self._end_autocast()
        tape.mark("after forward")
        tape.marks["saved"] = tape.since(before)
        tape.at("backward", ENDS_AFTER)
        seed = self.run.new(loss.elements, loss.dtype, "seed") if self.setup.stage.last else Tensor(loss.elements, loss.dtype, None)
        self.run.backward(loss, seed)
        del seed, loss
        self.stage_output = None
        if self.fsdp is not None:
            tape.at("backward", ENDS_BEFORE)
            self.fsdp.end_of_backward()

    def _end_autocast(self) -> None:
        """Copies that nothing saved (biases) go when the context ends."""
        if not self.run.copies:
            return
        by_layer: dict[int, list[Tensor]] = {}
        for p in self.parameters():
            copy = self.run.copies.pop(id(p), None)
            if copy is not None:
                by_layer.setdefault(p.layer, []).append(copy)
            del copy
        for layer in sorted(by_layer):
            self.tape.at("autocast", layer)
            del by_layer[layer]
            self.tape.touch("end of autocast")

    def _forward(self) -> Tensor:
        run, fsdp, stage = self.run, self.fsdp, self.setup.stage
        run.layer = ENDS_BEFORE
        if fsdp is not None and self.root_group is not None:
            self.root_group.pre_forward()
        self._make_tables()
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
        out = self._head(ends.pop(), whole) if stage.last else ends.pop()
        if fsdp is not None and self.root_group is not None and not (stage.piped and stage.last):
            fsdp.leave(self.root_group, out)
        return out

    def received(self) -> Tensor:
        """A pipeline stage's input: a buffer that is counted with all of its kind, and a leaf whose gradient is sent back."""
        size = self.symbols.sequence(self.setup.model.hidden)
        return Tensor(size, self._residual, None, Parameter("input", size, self._residual, True))

    def _embed(self) -> Tensor:
        s, setup = self.symbols, self.setup
        total: Tensor | None = None
        for op in setup.model.embedding:
            if op.kind != "embedding":
                continue
            found = self._look_up(op, total is None)
            summed = s.when(s.position_sequence(op.width), "several sequences")
            total = found if total is None else ops.add(self.run, total, found, summed=summed)
            del found
        assert total is not None
        return total

    def _look_up(self, op: Op, every_token: bool) -> Tensor:
        """One table: ids for every token, positions once where the batch is more than one sequence."""
        s, setup, w = self.symbols, self.setup, op.weights[0]
        dtype = setup.unsharded_dtype if self.fsdp else setup.stored
        table = self.root[w.name]
        if every_token:
            whole, part, join = s.tokens(op.width), s.sequence(op.width), s.when(s.tokens(op.width), "several sequences")
        else:
            whole, part, join = s.positions(op.width), s.position_sequence(op.width), ()
        if s.splits(w) is None:
            return ops.embedding(self.run, table, whole, dtype, table.elements)
        found = ops.embedding(self.run, table, whole, dtype, s.one(w.elements))
        if not s.sequence_parallel:
            return tensor.reduce_output(self.run, found)
        return tensor.scatter(self.run, found, part, join)

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

    def maybe_checkpoint(self, module: str, function: Callable[..., Tensor], args: list[Tensor]) -> Tensor:
        """A part of a layer under its own checkpoint, where `recompute_modules` names it."""
        structure = self.setup.structure
        if structure.recompute == "selective" and module in structure.recompute_modules:
            return checkpoint(self.run, function, args)
        return function(*args)

    def linear(self, op: Op, params: dict[str, Parameter], x: Tensor) -> Tensor:
        """A product with what stands beside it: autocast's copies, LoRA's adapters."""
        s = self.symbols
        out = s.region(op.region, op.width)
        part = "logits" if op.output == "logits" else "activations"
        main = [params[w.name] for w in op.weights]
        weight = main[0] if main else self.root[self.setup.model.embedding.ops[0].weights[0].name]
        bias = main[1] if len(main) > 1 else None
        row = s.tensor_parallel and op.parallel == "row"
        if row:
            out = s.tokens(op.width)
        y = self._product(x, weight, out, bias, part)
        adapters = self.setup.adapters(op)
        if adapters:
            a, b = (params[w.name] for w in adapters)
            down = self._product(x, a, s.tokens(self.setup.job.lora_rank), None, part)
            up = self._product(down, b, out, None, part)
            del down
            scaled = ops.scale(self.run, up)
            del up  # a temporary of the expression: gone before the sum
            y = ops.add(self.run, y, scaled)
            del scaled
        return self._reduced(y, op.width) if row else y

    def _reduced(self, x: Tensor, width: int) -> Tensor:
        """Partial sums of a row-parallel product (or of a split table), as the sequence region wants them."""
        if not self.symbols.sequence_parallel:
            return tensor.reduce_output(self.run, x)
        s = self.symbols
        return tensor.scatter(self.run, x, s.sequence(width), s.when(s.tokens(width), "several sequences"))

    def gathered(self, x: Tensor, width: int) -> Tensor:
        """The sequence region made whole."""
        s = self.symbols
        return tensor.gather(self.run, x, s.tokens(width), s.when(s.tokens(width), "several sequences"))

    def _product(self, x: Tensor, w: Parameter, out: Size, bias: Parameter | None, part: str) -> Tensor:
        if not self.setup.autocast:
            return ops.linear(self.run, x, w, out, bias, part)
        b = self._copy(bias) if bias is not None else None
        wt = self._copy(w)
        narrow = ops.cast(self.run, x, self.setup.compute)
        return ops.matmul(self.run, narrow, wt, out, b, part, bias.elements if bias is not None else ())

    def _copy(self, p: Parameter) -> Tensor:
        """Autocast's 16-bit copy of a parameter, made once a forward pass."""
        found = self.run.copies.get(id(p))
        if found is None:
            pack, self.run.pack = self.run.pack, lambda t: t
            found = self.run.copies[id(p)] = ops.cast(self.run, p.tensor(), self.setup.compute, part="parameters")
            self.run.pack = pack
        return found

    def _make_tables(self) -> None:
        """cos and sin for every position, once for the model; every layer gets them as arguments."""
        for head_dim in sorted({op.head_dim for block in self.layers for op in block.rows("rope")}):
            size = self.symbols.positions(head_dim)
            dtype = 4 if self.setup.model.family in WIDE_ROTARY else self._residual
            self.tables[head_dim] = (self.run.new(size, dtype, "cos"), self.run.new(size, dtype, "sin"))

    def _layer_tables(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What a layer gets: FSDP2 with mixed precision casts fp32 tables for each layer anew (`cast_forward_inputs`)."""
        if not self.setup.mixed:
            return dict(self.tables)
        compute = self.setup.compute
        return {d: (ops.cast(self.run, c, compute), ops.cast(self.run, s, compute)) for d, (c, s) in self.tables.items()}

    def rotary_tables(self, head_dim: int) -> tuple[Tensor, Tensor]:
        return self.tables[head_dim]

    @property
    def _residual(self) -> int:
        return self.setup.stored if self.setup.autocast else self.setup.compute

    def attention_core(self, op: Op) -> Callable[..., Tensor]:
        s, r, compute = self.symbols, self.run, self.setup.compute
        kind = self.setup.structure.attention
        out = s.split(op.heads * (op.v_head_dim or op.head_dim))
        repeats = op.heads != op.kv_heads
        view = self.setup.variant.single_kv

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if repeats and kind != "flash":
                k = ops.repeat_heads(r, k, s.split(op.heads * op.head_dim), view)
                v = ops.repeat_heads(r, v, out, view)
            if self.setup.autocast:
                q, k, v = (ops.cast(r, t, compute) for t in (q, k, v))
            if kind == "flash":
                return ops.sdpa(r, q, k, v, out, s.split(op.heads), "flash", s.one(24))
            if kind == "efficient":
                return ops.sdpa(r, q, k, v, out, s.padded_rows(op.heads), "efficient", s.one(16))
            many = self.setup.variant.batched  # one sequence: batch and heads merge without a copy
            loose = (many, many and (not repeats or view), many and (not repeats or view))
            if kind == "sdpa-math":
                return math_attention(r, q, k, v, s.scores(op.heads), s.mask(), out, loose)
            return ops.eager_attention(r, q, k, v, out, s.scores(op.heads), loose)

        return core

    def _head(self, x: Tensor, until_norm: list[Tensor]) -> Tensor:
        """Final norm, logits, loss. `until_norm`: what else the model's body holds until it returns."""
        s, model = self.symbols, self.setup.model
        norm_ops = [op for op in model.head if op.kind not in ("linear", "cross_entropy")]
        x = run_block(self, Block("final", tuple(norm_ops)), self.root, x) if norm_ops else x
        until_norm.clear()
        project = next(op for op in model.head if op.kind == "linear")
        logits = self._logits(project, x)
        del x
        if self.setup.stage.piped:
            self.stage_output = logits.view()  # the pipeline runtime keeps a stage's output until its backward is done
            if self.fsdp is not None and self.root_group is not None:
                self.fsdp.leave(self.root_group, logits)  # the schedule computes the loss, outside of the wrapped module
        if self._vocab_parallel:
            return tensor.vocab_parallel_loss(self.run, logits, s.tokens(), s.one(1))
        return ops.cross_entropy(self.run, logits, s.one(1))

    @property
    def _vocab_parallel(self) -> bool:
        return self.setup.job.loss == "vocab-parallel" and self.symbols.tensor_parallel

    def _logits(self, op: Op, x: Tensor) -> Tensor:
        """The output projection; split over the vocabulary under tensor parallelism and gathered again, unless the loss takes shards."""
        s, r = self.symbols, self.run
        if not s.tensor_parallel:
            return self.linear(op, self.root, x)
        if s.sequence_parallel:
            x = self.gathered(x, op.k)
        else:
            x = tensor.reduce_gradient(r, x)
        local = self.linear(op, self.root, x)
        del x
        return local if self._vocab_parallel else tensor.gather_logits(r, local, s.tokens(op.width))

    def _optimizer(self) -> None:
        self.tape.at("optimizer", ENDS_BEFORE)
        self.tape.touch("optimizer")
        if not self.setup.job.optimizer_in_backward:
            step_optimizer(self)


def _local(s: Symbols) -> Callable[..., Size]:
    return lambda ws, factor=1: tuple(item for w in ws for item in s.local(w, factor))


def _forget(p: Parameter) -> None:
    p.grad = p.accumulated = None
