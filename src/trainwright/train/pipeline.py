"""A pipeline schedule's own action lists on real ranks: the lists that the planner replays and the simulator executes are what runs here.

Each rank works through its list. Messages between two ranks carry no tag, so both ends take them in the order in which the sender's list produces them; a rank
posts the receives of a channel one after another until the one it needs is among them, and never waits for a send before the list's end. Every directed
pair of ranks that exchanges anything is a channel with a process group of its own: under NCCL that is a communicator and a stream, so that a send which
waits for its receiver holds up nothing but later sends to the same receiver, and no order of the lists can close a circle of waiting.

A split backward (I and W) keeps each linear layer's input and output gradient from I and makes the weight's gradient at W. Where weights are sharded
or split (FSDP2, tensor parallelism) I makes both at once and W has nothing left to do: the numbers are the same, the order of the work is the
plan's, its shape is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..cost.stages import layers_per_stage
from ..frameworks import FRAMEWORKS
from ..resolve import Run
from ..schedules import SCHEDULES
from ..schedules.actions import Action, ActionTable
from .data.batches import Batch
from .decoder import Decoder, build
from .mesh import AXES, Ranks
from .optimizer import settle
from .parallelize import apply, parameter_dtype
from .reduce import all_reduce_gradients, cap_of, sum_gradients

Key = tuple[str, int, int]  # F (an activation) or B (a gradient), the stage that receives it, microbatch


def table_of(run: Run) -> ActionTable:
    plan = run.plan
    return SCHEDULES.get_or_raise(plan.structure.schedule, "strategy.schedule").table(plan.pp, plan.accumulation, plan.virtual_stages)


def layers_of(run: Run, stages: int) -> list[range]:
    """The layers of each stage, dealt as the planner deals them."""
    s = run.plan.structure
    counts = layers_per_stage(run.model.num_layers, stages, s.layers_per_stage, FRAMEWORKS[s.framework].even_stages)
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - n, end) for end, n in zip(ends, counts)]


def part_of(run: Run, layers: range, first: bool, last: bool) -> Decoder:
    """The modules of one stage."""
    return build(run.model, attention=run.plan.structure.attention, layers=layers, first=first, last=last, dtype=parameter_dtype(run))


def channels(table: ActionTable) -> dict[tuple[int, int], list[Key]]:
    """(sender, receiver) -> what crosses, in the order of the sender's list."""
    place, found = table.placement, defaultdict(list)
    for rank, actions in enumerate(table.lists):
        for piece in (p for action in actions for p in action.parts or (action,)):
            forward = piece.kind == "F"
            to = piece.stage + 1 if forward else piece.stage - 1
            if piece.kind == "W" or not 0 <= to < place.stages:
                continue
            receiver = int(place.rank_of(to, piece.microbatch))
            if receiver != rank:
                found[rank, receiver].append(("F" if forward else "B", to, piece.microbatch))
    return dict(found)


class Mail:
    """This rank's messages of one step."""

    def __init__(self, table: ActionTable, ranks: Ranks) -> None:
        self.rank = ranks.rank("pp")
        self.peers = dist.get_process_group_ranks(ranks.group("pp"))
        crossing = channels(table)
        self.groups = {pair: _subgroup(ranks, pair) for pair in sorted(crossing)}
        self._open(ranks)
        self.incoming = {sender: keys for (sender, receiver), keys in crossing.items() if receiver == self.rank}
        self.source = {key: sender for sender, keys in self.incoming.items() for key in keys}
        self.begin()

    def _open(self, ranks: Ranks) -> None:
        """One element through every channel, in one order everywhere: NCCL makes a communicator at its first message and waits for the other end."""
        for (sender, receiver), group in self.groups.items():
            one = torch.zeros(1, device=ranks.machine.device)
            if self.rank == sender:
                dist.send(one, self.peers[receiver], group=group)
            elif self.rank == receiver:
                dist.recv(one, self.peers[sender], group=group)

    def begin(self) -> None:
        self.posted = dict.fromkeys(self.incoming, 0)
        self.arriving: dict[Key, tuple[torch.Tensor, Any]] = {}
        self.sending: list[tuple[torch.Tensor, Any]] = []

    def send(self, x: torch.Tensor, receiver: int) -> None:
        x = x.contiguous()
        work = dist.isend(x, self.peers[receiver], group=self.groups[self.rank, receiver])
        self.sending = [(t, w) for t, w in self.sending if w is not None and not w.is_completed()]
        self.sending.append((x, work))

    def receive(self, key: Key, empty: Callable[[], torch.Tensor]) -> torch.Tensor:
        sender = self.source[key]
        while key not in self.arriving:
            buffer = empty()
            work = dist.irecv(buffer, self.peers[sender], group=self.groups[sender, self.rank])
            self.arriving[self.incoming[sender][self.posted[sender]]] = (buffer, work)
            self.posted[sender] += 1
        buffer, work = self.arriving.pop(key)
        if work is not None:
            work.wait()
        return buffer

    def finish(self) -> None:
        for _, work in self.sending:
            if work is not None:
                work.wait()
        self.sending = []


class Deferred(torch.autograd.Function):
    """y = x W^T + b whose weight gradient is made later: backward leaves (x, dy) with `owed` and gives dx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, owner: Owed, module: nn.Linear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.module = owner, module
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.owner.add(ctx.module, x, dy)
        return dy @ weight, None, None, None, None


class Owed:
    """Weight gradients that a stage's I left for its W, by microbatch; at once where nothing is to be left."""

    def __init__(self) -> None:
        self.current: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] | None = None
        self.kept: dict[int, list[tuple[nn.Linear, torch.Tensor, torch.Tensor]]] = {}

    def add(self, module: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        if self.current is None:
            self._use(module, x, dy)
        else:
            self.current.append((module, x, dy))

    @torch.no_grad()
    def _use(self, module: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        for p, g in ((module.weight, lambda: dy.T @ x), (module.bias, lambda: dy.sum(0))):
            if p is not None and p.requires_grad:
                p.grad = g().to(p.dtype) if p.grad is None else p.grad.add_(g())

    def pay(self, microbatch: int) -> None:
        for owed in self.kept.pop(microbatch, ()):
            self._use(*owed)

    def attach(self, part: nn.Module) -> None:
        """Every plain linear layer of the part leaves its weight's gradient here."""
        for module in part.modules():
            if isinstance(module, nn.Linear) and not isinstance(module.weight, DTensor):
                module.forward = lambda x, m=module: Deferred.apply(autocasted(x), m.weight, m.bias, self, m)


def autocasted(x: torch.Tensor) -> torch.Tensor:
    """The input of a product as autocast casts it: a function of our own keeps what it is given, and W needs no more than the product's own format."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Stage:
    """One part of the model on this rank and what its microbatches leave until their backward."""

    def __init__(self, index: int, part: Decoder, call: nn.Module, splits: bool) -> None:
        self.index, self.part, self.call = index, part, call
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.backwards = 0
        self.owed: Owed | None = None
        self.wrapped = hasattr(part, "set_requires_gradient_sync")
        self.ddp: Any = call if isinstance(call, nn.parallel.DistributedDataParallel) else None
        if splits and not self.wrapped:
            self.owed = Owed()
            self.owed.attach(part)


class Pipeline:
    """The stages of this rank and their list. `run_step(batches, loss)` leaves the gradients of the whole step and returns this rank's summed loss."""

    def __init__(self, run: Run, ranks: Ranks, seed: int, backend: str | None = None) -> None:
        self.run, self.ranks, self.backend = run, ranks, backend
        self.table = table_of(run)
        place, me = self.table.placement, ranks.rank("pp")
        self.rank = me
        self.dtype = _boundary_dtype(run)
        cuts = layers_of(run, place.stages)
        splits = any(a.kind in ("I", "W") for a in self.table.lists[me])
        self.stages: dict[int, Stage] = {}
        for index in place.stages_of(me):
            part = self._part(cuts[index], index == 0, index == place.stages - 1)
            self.stages[index] = Stage(index, part, self._lay_out(part, seed), splits)
        self.mail = self._mail()
        self._pair_copies()

    # what a run on fake tensors does otherwise

    def _part(self, layers: range, first: bool, last: bool) -> Decoder:
        with torch.device("meta"):
            return part_of(self.run, layers, first, last)

    def _lay_out(self, part: Decoder, seed: int) -> nn.Module:
        return apply(part, self.run, self.ranks, seed, self.backend)

    def _mail(self) -> Mail:
        return Mail(self.table, self.ranks)

    # weights that two ranks hold

    def _pair_copies(self) -> None:
        """Groups over which a weight's gradient is summed because two ranks hold it: a tied table and head, the two copies of a bidirectional schedule."""
        place = self.table.placement
        self.pairs: list[tuple[Any, Callable[[], Iterator[nn.Parameter]]]] = []
        pairs: list[tuple[int, int, list[int], bool]] = []
        if place.streams == 2:
            pairs += [(r, place.ranks - 1 - r, place.stages_of(r), False) for r in range(place.ranks // 2)]
        ends = list(self._shared([], True)) if self.run.model.tied else []
        self.here = ends if len(ends) == 2 else []  # table and head on this very rank
        for p in self.here[1:]:
            p.is_copy = True
        if place.streams == 1 and self.run.model.tied and self._first_rank != self._last_rank:
            pairs.append((self._first_rank, self._last_rank, [], True))
        for a, b, stages, tied in pairs:
            group = _subgroup(self.ranks, (a, b))
            if self.rank not in (a, b):
                continue
            for p in self._shared(stages, tied):
                p.is_copy = self.rank == b if tied else self._is_copy(p)
            self.pairs.append((group, partial(self._shared, stages, tied)))

    @property
    def _first_rank(self) -> int:
        return int(self.table.placement.rank_of(0, 0))

    @property
    def _last_rank(self) -> int:
        return int(self.table.placement.rank_of(self.table.placement.stages - 1, 0))

    def _is_copy(self, p: nn.Parameter) -> bool:
        """Of a bidirectional schedule's two copies the one on the way back counts for nothing in sums over all weights."""
        return any(
            p is q for i, s in self.stages.items() for q in s.part.parameters() if int(self.table.placement.rank_of(i, 0)) != self.rank
        )

    def _shared(self, stages: list[int], tied: bool) -> Iterator[nn.Parameter]:
        """The table or head, or all of those stages' weights but a head whose table is here as well."""
        if not tied:
            for index in stages:
                yield from (p for p in self.stages[index].part.parameters() if not any(p is q for q in self.here[1:]))
            return
        for s in self.stages.values():
            if s.part.embed is not None:
                yield s.part.embed.module(self.run.model.embedding.ops[0]).weight
            elif s.part.head is not None:
                yield s.part.head.module("lm_head").weight

    # one step

    def run_step(
        self, batches: list[Batch], loss: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """`loss(logits, labels)` gives (what is differentiated, what is reported)."""
        self.batches, self.loss = batches, loss
        self.total = torch.zeros((), device=self.ranks.machine.device)
        self.local: dict[Key, torch.Tensor] = {}
        self.mail.begin()
        for stage in self.stages.values():
            stage.backwards = 0
        for action in self.table.lists[self.rank]:
            for piece in action.parts or (action,):
                self._do(piece)
        self.mail.finish()
        self._sum_gradients()
        return self.total

    def _do(self, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            self._forward(stage, m)
        elif action.kind == "W":
            if stage.owed is not None:
                stage.owed.pay(m)
        else:
            self._backward(stage, m, keep=action.kind == "I")

    def _give(self, key: Key, x: torch.Tensor) -> None:
        receiver = int(self.table.placement.rank_of(key[1], key[2]))
        if receiver == self.rank:
            self.local[key] = x
        else:
            self.mail.send(x, receiver)

    def _take(self, key: Key) -> torch.Tensor:
        if key in self.local:
            return self.local.pop(key)
        return self.mail.receive(key, self._empty)

    def _empty(self) -> torch.Tensor:
        batch = self.batches[0].tokens
        tokens = batch.shape[1]
        if self.run.plan.structure.sequence_parallel and self.ranks.size("tp") > 1:
            tokens //= self.ranks.size("tp")
        return torch.empty(batch.shape[0], tokens, self.run.model.hidden, dtype=self.dtype, device=self.ranks.machine.device)

    def _forward(self, stage: Stage, m: int) -> None:
        batch, last = self.batches[m], stage.index == self.table.placement.stages - 1
        if stage.wrapped:
            # FSDP2 reduces a layer's gradients in a node of that layer's forward, and autograd runs later nodes first. Autocast's copy of a weight, cached
            # since an earlier micro-batch, is an earlier node: its gradient would come after the reduction and be lost.
            torch.clear_autocast_cache()
        x = batch.tokens if stage.index == 0 else self._take(("F", stage.index, m)).detach().requires_grad_()
        self._sync(stage)
        given = (batch.labels,) if last and stage.part.loss is not None else ()
        with stage.ddp.no_sync() if stage.ddp else nullcontext():
            out = stage.call(x, batch.positions, batch.documents, *given)
        if last:
            out, reported = self.loss(out, batch.labels)
            self.total += reported
        else:
            self._give(("F", stage.index + 1, m), out.detach())
        stage.held[m] = (x, out)

    def _backward(self, stage: Stage, m: int, keep: bool) -> None:
        x, out = stage.held.pop(m)
        last = stage.index == self.table.placement.stages - 1
        stage.backwards += 1
        self._sync(stage)
        if stage.owed is not None:
            stage.owed.current = stage.owed.kept.setdefault(m, []) if keep else None
        torch.autograd.backward(out, None if last else self._take(("B", stage.index, m)).to(out.dtype))
        if stage.owed is not None:
            stage.owed.current = None
        if stage.index > 0:
            assert x.grad is not None
            self._give(("B", stage.index - 1, m), x.grad.to(self.dtype))

    def _sync(self, stage: Stage) -> None:
        """A stage's gradients are summed with its last backward of the step, of which DDP's reducer is told here: forward passes run ahead of it. FSDP2 keeps
        its weights from one backward to the next forward until then, as torch.distributed.pipelining's own stages do."""
        mine = sum(int(self.table.placement.rank_of(stage.index, m)) == self.rank for m in range(self.run.plan.accumulation))
        stage.part.turn.sums = last = stage.backwards == mine
        if stage.wrapped:
            stage.part.set_requires_gradient_sync(last)
            stage.part.set_is_last_backward(last)
            stage.part.set_reshard_after_backward(last)
        if stage.ddp and last:
            stage.ddp.reducer.prepare_for_backward([])

    def _sum_gradients(self) -> None:
        sum_gradients([s.part for s in self.stages.values() if not s.ddp], self.ranks)
        for p in self.here:
            settle(p)
        both = [p.grad for p in self.here if p.grad is not None]
        for head in both[1:]:
            both[0].add_(head)
        for group, parameters in self.pairs:
            all_reduce_gradients(list(parameters()), group, cap_mb=cap_of(self.run.plan))
        for head in both[1:]:
            head.copy_(both[0])


def _boundary_dtype(run: Run) -> torch.dtype:
    """What crosses between stages: the residual stream, in 16 bits where parameters are used in 16 bits."""
    from .parallelize import DTYPES

    return torch.float32 if run.job.autocast else DTYPES[run.job.precision]


def _columns(ranks: Ranks) -> list[list[int]]:
    """The global ranks of every pipeline, this one's among them; counted, since a mesh's own tensor cannot be read where tensors are fake."""
    shape = tuple(ranks.size(axis) for axis in AXES)
    return [c.tolist() for c in np.moveaxis(np.arange(ranks.world).reshape(shape), AXES.index("pp"), -1).reshape(-1, ranks.size("pp"))]


def _subgroup(ranks: Ranks, members: tuple[int, int]) -> Any:
    """A group of two ranks of the pipeline, made for every pipeline at once; None on the others."""
    return dist.new_subgroups_by_enumeration([[c[i] for i in members] for c in _columns(ranks)])[0]
