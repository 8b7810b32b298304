"""One optimizer step by DeepSpeed, from the plan's ``ds_config.json``. Data, the loss over tokens, learning rates and the loop are those of every trainer.

Weights are built and, for ZeRO-3, cut a block at a time, so that no rank ever holds the whole model. For a checkpoint every tensor is put together on one
rank of all (the one that has the least so far), in the host's memory and in fp32, under the names of `state`: a run goes on in any other layout, in either
engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..resolve import Run
from . import experts, weights
from . import optimizer as optimizers
from .data.batches import Batch
from .decoder import Decoder, Table, build, initialize
from .engines.deepspeed import OPS
from .extensions import loaded
from .losses import loss_of
from .mesh import Ranks
from .metrics import peak_bytes, tensor_bytes
from .parallelize import parameter_dtype, recompute
from .settings import Settings
from .state import key
from .step import IGNORED, Trainer, plain

KINDS = ("exp_avg", "exp_avg_sq")  # of AdamW, one number a weight; ``step`` is one number for all


def imported(ranks: Ranks) -> Any:
    """The package, set up for this machine: it reads these choices while it is imported, and the process group is there already."""
    os.environ["DS_ACCELERATOR"] = ranks.machine.kind
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    # Only its inference kernels use this one, and compiling it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for each in filter(None, os.environ.get(OPS, "").split(";")):
        name, _, file = each.partition("=")
        OpBuilder._loaded_ops.setdefault(name, loaded(name, file))
    deepspeed.init_distributed(dist_backend=ranks.machine.backend, auto_mpi_discovery=False)
    return deepspeed


class DeepSpeedTrainer(Trainer):
    """`config` is the emitted file. Raises what DeepSpeed raises."""

    def __init__(self, run: Run, settings: Settings, ranks: Ranks, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.stage = int(config["zero_optimization"]["stage"])
        self.package = imported(ranks)
        self.kept: dict[str, torch.Tensor] = {}
        self.loads = False
        super().__init__(run, settings, ranks)

    # building

    def _build(self) -> None:
        self.pipeline = None
        with torch.device("meta"):
            part = build(self.run.model, attention=self.run.plan.structure.attention, dtype=parameter_dtype(self.run))
        if self.run.job.moe_capacity_factor is not None:
            experts.limit(part, self.run.job.moe_capacity_factor)
        for name, block in blocks(part):
            self._fill(name, block, part)
        recompute(part, self.run)
        self.shapes = {plain(n): getattr(p, "ds_shape", p.shape) for n, p in part.named_parameters()}
        self.parts = [part]

    def _fill(self, name: str, block: nn.Module, part: Decoder) -> None:
        """One block's weights, made from their names or read, then cut."""
        block.to_empty(device=self.ranks.machine.device)
        if block is part.head and part.model.tied:
            part.tie()
        mine = [(f"{name}.{n}", p) for n, p in block.named_parameters() if not hasattr(p, "ds_id")]
        if block is part.head and part.model.tied:
            mine = [(n, p) for n, p in mine if p is not part.head.module("lm_head").weight]  # the embedding's, filled with it
        for n, p in mine:
            initialize(n, p, self.settings.seed)
        if self.settings.init:
            weights.load(self.run.model, Path(self.settings.init), mine)
        if self.stage == 3:
            self.package.zero.Init(module=block, config_dict_or_path=self.config)

    def _load_initial(self) -> None:
        """Done block by block."""

    def _make_optimizer(self) -> None:
        decayed = [len(self.shapes[n]) > 1 for n, _ in self.named]
        made = []
        for decay in (True, False):
            chosen = [p for (_, p), d in zip(self.named, decayed) if d is decay]
            made.append({"params": chosen, "weight_decay": self.settings.weight_decay if decay else 0.0})
        self.engine, _, _, _ = self.package.initialize(
            model=self.parts[0], model_parameters=[g for g in made if g["params"]], config=self.config, dist_init_required=False
        )
        self.masters = None
        self.optimizer = self.engine.optimizer
        self.calls = [self.engine]

    # one step

    def _forward_backward(self, batch: Batch, factor: Callable[[], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=self.ranks.machine.device)
        pieces = self.micro_batches(batch)
        for i, piece in enumerate(pieces):
            loss = loss_of(self.engine(piece.tokens, piece.positions, piece.documents), piece.labels)
            total += loss.detach()
            self.engine.backward(loss * factor(), scale_wrt_gas=False)
            if i < len(pieces) - 1:
                self.engine.step()  # only counts the micro-batch
        return total

    def _update(self) -> tuple[float, bool]:
        once = [p for _, p in self.named]
        norm = optimizers.gradient_norm(once, self.ranks) if self.stage == 0 else None
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return float(norm), not self.engine.was_step_applied()

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's weights and of the optimizer's states, the flat fp32 copies that ZeRO steps on among them."""
        states = self.engine.basic_optimizer.state
        copies = [] if self.stage == 0 else list(states)
        found = {
            "parameters": tensor_bytes(getattr(p, "ds_tensor", p) for _, p in self.named),
            "optimizer": tensor_bytes([*copies, *(v for s in states.values() for v in s.values())]),
        }
        return found | peak_bytes()

    # what is kept

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that are put together on this rank, in the host's memory. After `expect`, `loaded` hands what is written into them to DeepSpeed."""
        found: dict[str, torch.Tensor] = {}
        self._link_states()
        step = self._steps_taken()
        for name, p, owner in self._owners():
            mine = owner == dist.get_rank()
            for kind in (None, *KINDS):
                whole = self._whole(p, kind)
                if mine and whole is not None:
                    found[key(name, kind)] = whole.detach().float().cpu().clone()
            if mine and step is not None:
                found[key(name, "step")] = torch.tensor(float(step))
        self.kept = found if self.loads else {}
        return found

    def expect(self) -> None:
        """The optimizer's states exist from its first step on: one at rate 0 over tokens that count for nothing changes no weight."""
        rows = self.run.plan.accumulation * self.run.plan.micro_batch_size
        tokens = torch.zeros(rows, 1, dtype=torch.int64)
        documents = torch.zeros_like(tokens) if self.run.job.packing else None
        self.loads = True
        self.step(Batch(tokens, torch.full_like(tokens, IGNORED), torch.zeros_like(tokens), documents))
        self.steps = 0

    def _set_rate(self) -> float:
        rate = super()._set_rate()
        if self.loads:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        return rate

    def loaded(self, progress: dict[str, Any]) -> None:
        for name, p, owner in self._owners():
            for kind in (None, *KINDS):
                self._set(p, kind, self._sent(self.kept.get(key(name, kind)), self.shapes[name], owner))
        first, _, owner = next(iter(self._owners()))
        step = self._sent(self.kept.get(key(first, "step")), (), owner)
        for state in self.engine.basic_optimizer.state.values():
            counts = isinstance(state["step"], torch.Tensor)  # each its own: it is counted up in place
            state["step"] = step.to(state["step"], copy=True) if counts else int(step)
        self.kept, self.loads = {}, False
        self.steps = int(progress["steps"])

    def _owners(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """(name, parameter, the rank on which it is put together), the same on every rank."""
        held = [0] * dist.get_world_size()
        for name, p in self.named:
            owner = min(range(len(held)), key=held.__getitem__)
            held[owner] += torch.Size(self.shapes[name]).numel()
            yield name, p, owner

    def _link_states(self) -> None:
        """ZeRO-1 and 2 link weights to their states after the first group's first step, and never those of the other groups (0.19.8)."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        for i, group in enumerate(getattr(self.optimizer, "bit16_groups", ())):
            lazy_init_hp_params_optimizer_state(group, self.optimizer.single_partition_of_fp32_groups[i], self.optimizer.state)

    def _steps_taken(self) -> int | None:
        found = [int(s["step"]) for s in self.engine.basic_optimizer.state.values() if "step" in s]
        return max(found, default=None)

    def _whole(self, p: nn.Parameter, kind: str | None) -> torch.Tensor | None:
        """The fp32 weight, or its state of that kind, on every rank."""
        if self.stage == 0:
            return p if kind is None else self.optimizer.state[p].get(kind)
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found: torch.Tensor = safe_get_full_fp32_param(p) if kind is None else safe_get_full_optimizer_state(p, kind)
        return found

    def _sent(self, mine: torch.Tensor | None, shape: Iterable[int], owner: int) -> torch.Tensor:
        device = self.ranks.machine.device
        value = torch.empty(tuple(shape), device=device) if mine is None else mine.to(device)
        dist.broadcast(value, owner)
        return value

    @torch.no_grad()
    def _set(self, p: nn.Parameter, kind: str | None, value: torch.Tensor) -> None:
        from deepspeed import utils

        if self.stage == 3:
            if kind is None:
                with self.package.zero.GatheredParameters([p], modifier_rank=0):
                    p.copy_(value)
            piece = part_of(value, p.ds_tensor.numel(), dist.get_rank())
            if kind is None:
                utils.safe_set_local_fp32_param(p, piece)
            else:
                utils.safe_set_local_optimizer_state(p, piece, kind)
            return
        if kind is None:
            p.copy_(value)
        if self.stage == 0:
            if kind is not None:
                self.optimizer.state[p][kind].copy_(value)
        elif kind is None:
            utils.safe_set_full_fp32_param(p, value)
        else:
            utils.safe_set_full_optimizer_state(p, value, kind)


def blocks(part: Decoder) -> Iterator[tuple[str, Table]]:
    """The tables of a whole model with the names that begin their weights' names, embedding first."""
    for name, block in (("embed", part.embed), *((f"layers.{n}", layer) for n, layer in part.layers.items()), ("head", part.head)):
        assert isinstance(block, Table)
        yield name, block


def part_of(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The `rank`-th run of `size` elements of a flattened tensor, zeros beyond its end: how ZeRO-3 cuts a weight."""
    flat = whole.reshape(-1)
    piece = flat.new_zeros(size)
    mine = flat[rank * size : (rank + 1) * size]
    piece[: len(mine)] = mine
    return piece


__all__ = ["DeepSpeedTrainer"]
