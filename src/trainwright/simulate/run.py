"""One rank's run of the model on its place in the mesh: groups, weights, memory, and the hooks that the layers call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .collectives import Array
from .data import Micro, micros, token_weight
from .expert import Routing
from .fsdp import Optimizer, Store
from .layout import Layout
from .memory import Ledger
from .model import Batch, Parameter, TinyConfig, parameters
from .pipeline import Plan, execute, plan
from .world import Rank, Traffic, World

__all__ = ["Micro", "Result", "Run", "train"]


class Run:
    """What a layer sees: this rank's weights (`weight`), gradients (`add`), groups (`tp`, `cp`, `ep`), and how to round (`cast`)."""

    def __init__(
        self,
        config: TinyConfig,
        layout: Layout,
        plan: Plan,
        rank: Rank,
        weights: dict[str, Array],
        optimizer: Optimizer,
        length: int,
    ) -> None:
        self.config, self.layout, self.rank, self.length = config, layout, rank, length
        self.at = at = layout.coordinate(rank.index)
        self.tp, self.cp, self.ep, self.data = (rank.group(layout.group(axis, at)) for axis in ("tp", "cp", "ep", "data"))
        self.ledger = Ledger()
        self.routing: dict[tuple[int, int, int], Routing] = {}  # by step, block, microbatch
        self.number = self.step_tokens = 0
        self.forwards: Counter[int] = Counter()
        self.deferred: list[Callable[[], None]] | None = None
        sizes, where = {"tp": layout.tp, "ep": layout.ep}, {"tp": at.tp, "ep": layout.ep_index(at)}
        self.store = Store(
            config,
            layout,
            rank,
            at,
            plan.units_of(at.pp),
            plan.holders(),
            lambda p: weights[p.name][p.cut(sizes, where)],
            parameters(config),
            self.ledger,
            optimizer,
        )

    def weight(self, name: str) -> Array:
        """This rank's part of a weight, whole along data parallelism, while its unit is gathered."""
        return self.store.weight(name)

    def add(self, name: str, gradient: Array) -> None:
        """Add to a weight's gradient."""
        self.store.add(name, gradient)

    @property
    def keeps_probabilities(self) -> bool:
        return not self.layout.flash and self.cp.size == 1 and self.layout.recompute != "selective"

    def cast(self, x: Array) -> Array:
        """Rounding of a forward result; exact here, `precision` overrides it, as the three below."""
        return x

    def cast_gradient(self, x: Array) -> Array:
        """Rounding of a gradient."""
        return x

    def operand(self, x: Array) -> Array:
        """What a forward product reads of its inputs and weights (FP8 has a scale and a format of its own for it)."""
        return x

    def gradient_operand(self, x: Array) -> Array:
        """What a backward product reads of the gradient."""
        return x

    def upstream(self, weight: float) -> Any:
        """The gradient of the step's loss with respect to one token's loss."""
        return weight

    def add_part(self, name: str, index: int, gradient: Array) -> None:
        """Add to one expert's part of a stacked weight's gradient."""
        self.store.add_at(name, index, gradient)

    def later(self, work: Callable[[], None]) -> None:
        """Weight gradients: now, or in the W action where backward is split."""
        if self.deferred is None:
            work()
        else:
            self.deferred.append(work)

    def unit_done(self, unit: int) -> None:
        self.later(lambda: self.store.end_unit(unit))

    def count_forward(self, unit: int) -> None:
        self.forwards[unit] += 1

    def keep_activations(self, size: int) -> None:
        """What a forward left behind: on the device, or moved to the host."""
        self.ledger.hold("activations", size)
        if self.layout.offload == "activations":
            self.store.host("to_host", size)
            self.ledger.free("activations", size)
            self.ledger.hold("host", size)

    def fetch_activations(self, size: int) -> None:
        if self.layout.offload == "activations":
            self.store.host("from_host", size)
            self.ledger.free("host", size)
            self.ledger.hold("activations", size)

    def update(self, number: int) -> None:
        """The optimizer step; `precision` scales, checks and rounds around it."""
        self.store.step(number)

    def step(self, number: int, batch: Batch, groups: Array | None, plan: Plan) -> float | None:
        """Forward, backward, reduction and optimizer of one batch; the loss, on ranks of the last stage."""
        self.number = number
        share = micros(self.layout, self.at, batch, groups)
        rank_tokens = sum(m.valid for m in share)
        everyone = int(self.data.all_reduce(np.array([rank_tokens]), "loss")[0])
        self.step_tokens = everyone
        weights = [token_weight(self.layout, everyone, rank_tokens, m.valid) for m in share]
        loss = execute(self, plan, share, weights)
        self.ledger.mark("backward done")
        self.store.finish_gradients()
        self.ledger.mark("gradients reduced")
        self.reduced = self.store.snapshot()
        self.update(number)
        self.ledger.mark("optimizer step")
        if self.config.head_unit not in plan.units_of(self.at.pp):
            return None
        if len(plan.holders()[self.config.head_unit]) > 1:  # two directions: each end has its half of the microbatches' loss
            ends = sorted(plan.holders()[self.config.head_unit])
            group = self.rank.group([self.layout.rank(self.at._replace(pp=p)) for p in ends])
            loss = float(group.all_reduce(np.array([loss]), "loss")[0])
        return float(self.data.all_reduce(np.array([loss]), "loss")[0])


@dataclass
class Result:
    """A finished run: loss per step, the last step's gradients and the final weights as on one device, and what every rank moved, held and routed."""

    losses: list[float]
    gradients: dict[str, Array]
    weights: dict[str, Array]
    traffic: Traffic
    ledgers: list[Ledger]
    routing: list[dict[tuple[int, int, int], Routing]]
    forwards: list[Counter[int]]
    replica_spread: float
    layout: Layout = field(default_factory=Layout)


def train(
    config: TinyConfig,
    layout: Layout,
    batches: Sequence[Batch],
    weights: dict[str, Array],
    *,
    optimizer: Optimizer | None = None,
    groups: Array | None = None,
    run_type: Callable[..., Run] = Run,
) -> Result:
    """Train on the batches, one optimizer step each, over `layout.world_size` virtual ranks.

    `groups`: capacity groups of the tokens (see `data.capacity_groups`). Raises `SpecError` where the layout does not fit the model or the batch.
    """
    layout.check(config, *batches[0].shape)
    actions = plan(config, layout)
    world = World(layout.world_size)
    chosen = optimizer or Optimizer()

    def program(rank: Rank) -> tuple[Run, list[float | None]]:
        run = run_type(config, layout, actions, rank, weights, chosen, batches[0].shape[1])
        run.ledger.mark("start")
        return run, [run.step(i + 1, batch, groups, actions) for i, batch in enumerate(batches)]

    finished = world.run(program)
    runs = [r for r, _ in finished]
    losses = next(found for _, found in finished if found[0] is not None)
    gradients, spread = assemble(config, layout, [r.reduced for r in runs])
    final, weight_spread = assemble(config, layout, [r.store.snapshot(weights=True) for r in runs])
    return Result(
        [float(x) for x in losses if x is not None],
        gradients,
        final,
        world.traffic,
        [r.ledger for r in runs],
        [r.routing for r in runs],
        [r.forwards for r in runs],
        max(spread, weight_spread),
        layout,
    )


def assemble(config: TinyConfig, layout: Layout, parts: Sequence[dict[str, tuple[int, Array, int]]]) -> tuple[dict[str, Array], float]:
    """Full arrays out of every rank's shards, and the largest difference between copies of the same element (0: all replicas agree).

    `parts[rank][name]` is (first element, elements, size) of this rank's shard of its tensor- and expert-parallel part of the weight.
    """
    full: dict[str, Array] = {}
    spread = 0.0
    wanted = {p.name: p for p in parameters(config)}
    for rank, held in enumerate(parts):
        at = layout.coordinate(rank)
        sizes, where = {"tp": layout.tp, "ep": layout.ep}, {"tp": at.tp, "ep": layout.ep_index(at)}
        for name, (first, values, _) in held.items():
            p: Parameter = wanted[name]
            if name not in full:
                full[name] = np.full(p.shape, np.nan, values.dtype)
            part = full[name][p.cut(sizes, where)]
            flat = part.reshape(-1).copy()
            known = flat[first : first + values.size]
            both = ~np.isnan(known)
            if both.any():
                spread = max(spread, float(np.abs(known[both] - values[both]).max()))
            flat[first : first + values.size] = values
            part[...] = flat.reshape(part.shape)
    return full, spread
