"""A model's ends and the parts of its layers that depend on the layout: look-ups, products under tensor parallelism, attention, logits and loss."""

from __future__ import annotations

from collections.abc import Callable

from ...spec.blocks import Block, Op
from . import ops, ring, tensor
from .blocks import WIDE_ROTARY, run_block
from .checkpoint import checkpoint
from .chunks import chunked_loss
from .machine import EARLIER, Node, Parameter, Tensor
from .math_attention import math_attention
from .owned import TABLE_COPY, Owned
from .sizes import Size


class Modules(Owned):
    """What a forward pass is made of, apart from its order."""

    def received(self) -> Tensor:
        """A pipeline stage's input: a buffer that is counted with all of its kind, and a leaf whose gradient is sent back."""
        size = self.symbols.sequence(self.setup.model.hidden)
        self.stage_input = Parameter("input", size, self.setup.types.stream, True)
        return Tensor(size, self.setup.types.stream, None, self.stage_input)

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
        dtype = setup.types.read
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
        weight = params[op.weights[0].name] if op.weights else self.output_weight(op)
        bias = params[op.weights[1].name] if len(op.weights) > 1 else None
        row = s.tensor_parallel and op.parallel == "row"
        if row:
            out = s.tokens(op.width)
        y = self.product(x, weight, out, bias, part)
        adapters = self.setup.adapters(op)
        if adapters:
            a, b = (params[w.name] for w in adapters)
            down = self.product(x, a, s.tokens(self.setup.job.lora_rank), None, part)
            up = self.product(down, b, out, None, part)
            del down
            scaled = ops.scale(self.run, up)
            del up  # a temporary of the expression: gone before the sum
            y = ops.add(self.run, y, scaled)
            del scaled
        return self._reduced(y, op.width) if row else y

    def output_weight(self, op: Op) -> Parameter:
        """The output projection's weight: its own, or the embedding's where tied."""
        if self.setup.copies_table:
            return self.root[TABLE_COPY]
        return self.root[(op if op.weights else self.setup.model.embedding.ops[0]).weights[0].name]

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

    def product(self, x: Tensor, w: Parameter, out: Size, bias: Parameter | None, part: str) -> Tensor:
        if not self.setup.types.autocast:
            return ops.linear(self.run, x, w, out, bias, part)
        b = self._copy(bias) if bias is not None else None
        wt = self._copy(w)
        narrow = ops.cast(self.run, x, self.setup.types.compute)
        return ops.matmul(self.run, narrow, wt, out, b, part, bias.elements if bias is not None else ())

    def _copy(self, p: Parameter) -> Tensor:
        """Autocast's 16-bit copy of a parameter, made once in a context: in a pipeline by the first micro-batch, so that in the backward pass of every later
        one autograd comes to it last of all, and the 16-bit gradients of all weights wait for it."""
        found = self.run.copies.get(id(p))
        if found is None:
            pack, self.run.pack = self.run.pack, lambda t: t
            found = self.run.copies[id(p)] = ops.cast(self.run, p.tensor(), self.setup.types.compute, part="parameters")
            self.run.pack = pack
            if self.run.keeps_copies and isinstance(found.node, Node):
                found.node.seq -= EARLIER
        return found

    def _make_tables(self) -> None:
        """cos and sin for every position, once for the model; every layer gets them as arguments."""
        for head_dim in sorted({op.head_dim for block in self.layers for op in block.rows("rope")}):
            size = self.symbols.positions(head_dim)
            dtype = 4 if self.setup.model.family in WIDE_ROTARY else self.setup.types.stream
            self.tables[head_dim] = (self.run.new(size, dtype, "cos"), self.run.new(size, dtype, "sin"))

    def rotary_tables(self, head_dim: int) -> tuple[Tensor, Tensor]:
        return self.tables[head_dim]

    def attention_core(self, op: Op) -> Callable[..., Tensor]:
        s, r, compute = self.symbols, self.run, self.setup.types.compute
        kind = self.setup.structure.attention
        out = s.split(op.heads * (op.v_head_dim or op.head_dim))
        repeats = op.heads != op.kv_heads
        view = self.setup.variant.single_kv

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if repeats and kind != "flash":
                k = ops.repeat_heads(r, k, s.split(op.heads * op.head_dim), view)
                v = ops.repeat_heads(r, v, out, view)
            if self.setup.types.autocast:
                q, k, v = (ops.cast(r, t, compute) for t in (q, k, v))
            if self.setup.variant.context > 1:
                return ops.copied(r, ring.attention(r, q, k, v, ring_of_ranks(self, op)))  # merged by head, copied into rows
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
        if self.setup.job.loss == "chunked":
            return chunked_loss(self, project, x)
        if self.setup.job.loss == "fused":
            return self._fused(project, x)
        logits = self._logits(project, x)
        del x
        if self.setup.stage.piped:
            self.stage_output = logits.view()
            if self.fsdp is not None and self.root_group is not None:
                self.fsdp.leave(self.root_group, logits)  # the schedule computes the loss, outside of the wrapped module
        with self.tape.leaving("loss"):
            if self._vocab_parallel:
                return tensor.vocab_parallel_loss(self.run, logits, s.tokens(), s.one(1))
            return ops.cross_entropy(self.run, logits, s.one(1))

    def _fused(self, op: Op, x: Tensor) -> Tensor:
        """Projection and loss in one kernel, on 16-bit copies under autocast."""
        weight = self.output_weight(op).tensor()
        if self.setup.types.autocast:
            x, weight = (ops.cast(self.run, t, self.setup.types.compute) for t in (x, weight))
        return ops.fused_loss(self.run, x, weight, self.symbols.one(1))

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


def ring_of_ranks(step: Modules, op: Op) -> ring.Ring:
    """The sizes of an attention whose sequence lies on several ranks."""
    s = step.symbols
    key, value = s.split(op.kv_heads * op.head_dim), s.split(op.kv_heads * (op.v_head_dim or op.head_dim))
    gathers = step.setup.structure.cp_kind == "allgather"
    everyone = s.every_rank(op.kv_heads * (op.head_dim + (op.v_head_dim or op.head_dim))) if gathers else ()
    query = s.split(op.heads * op.head_dim)
    return ring.Ring(query, key, value, s.split(op.heads), s.one(1), everyone, step.setup.variant.context)
