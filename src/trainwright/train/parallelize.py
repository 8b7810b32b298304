"""The plan's layout put on a model: tensor parallelism, recomputation, then data parallelism around it, with PyTorch's public wrappers only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..errors import SpecError
from ..frameworks import FRAMEWORKS
from ..frameworks.dtypes import Dtypes, dtypes
from ..resolve import Run
from ..schedules import SCHEDULES
from ..spec.blocks import Op
from . import context, experts, losses
from .compiled import compile_blocks
from .decoder import Decoder, Table, initialize
from .mesh import Ranks
from .models import every_second_product
from .modules import Experts, LayerNorm, RMSNorm, Router
from .reduce import Sums, Turn, cap_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def formats(run: Run) -> Dtypes:
    """The number formats that the plan's estimate counts."""
    s = run.plan.structure
    return dtypes(FRAMEWORKS[s.framework], run.job, s, alone=run.plan.dp * run.plan.cp == 1)


def parameter_dtype(run: Run) -> torch.dtype:
    """What parameters are stored in."""
    return torch.float32 if formats(run).stored == 4 else DTYPES[run.job.precision]


def mixed_precision(run: Run) -> MixedPrecisionPolicy:
    if not formats(run).mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[run.job.precision], reduce_dtype=DTYPES[run.job.gradient_dtype])


# --- tensor parallelism ----------------------------------------------------------------------------------------------------------------------------


def split_table(table: Table, mesh: DeviceMesh, turn: Turn, *, sequence: bool, vocabulary: bool) -> None:
    """Columns, then rows, of one block over the tp axis (arXiv:1909.08053), its norms on parts of the sequence where `sequence` (arXiv:2205.05198)."""
    between = Shard(1) if sequence else Replicate()
    group = mesh.get_group()
    plan: dict[str, ParallelStyle] = {}
    for op in table.ops:
        if op.name in table.within:
            continue
        if op.kind == "embedding" and op.weights[0].tp_dim is not None and (sequence or not op.weights[0].tp_needs_sp):
            plan[table.paths[op.name]] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        elif op.kind == "linear" and op.name == "lm_head":
            plan[table.paths[op.name]] = ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1) if vocabulary else Replicate(), use_local_output=not vocabulary
            )
        elif op.kind == "linear" and op.parallel == "column":
            plan[table.paths[op.name]] = ColwiseParallel()
        elif op.kind == "linear" and op.parallel == "row":
            plan[table.paths[op.name]] = RowwiseParallel(output_layouts=between)
        elif op.kind == "norm" and (sequence or op.region == "tensor"):
            module = table.module(op)
            assert isinstance(module, (RMSNorm, LayerNorm))
            module.shared = Sums(group, turn)
    parallelize_module(table, mesh, plan)
    if sequence:
        for module in table.modules():
            if isinstance(module, Router):
                module.shared = Sums(group, turn)
        table.enter = lambda name, op, x: _gathered(op, x, mesh)


def _gathered(op: Op, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Parts of the sequence -> the whole, once for all column-split products that read it (their gradients are summed and scattered in one collective)."""
    if op.name == "lm_head" or op.kind != "linear" or op.parallel != "column":
        return x
    return DTensor.from_local(x, mesh, (Shard(1),), run_check=False).redistribute(mesh, (Replicate(),))


def split_over(part: Decoder, run: Run, mesh: DeviceMesh) -> None:
    heads, kv, tp = run.model.heads, run.model.kv_heads, mesh.size()
    if heads % tp or kv % tp:
        raise SpecError(f"{heads} heads and {kv} key-value heads do not divide over tensor size {tp}", "strategy.tp")
    sequence, vocabulary = run.plan.structure.sequence_parallel, run.job.loss == "vocab-parallel"
    for table in (part.embed, *part.layers.values(), part.head):
        if isinstance(table, Table):
            split_table(table, mesh, part.turn, sequence=sequence, vocabulary=vocabulary)
    if part.head is not None and part.model.tied:
        part.tie()


# --- recomputation ---------------------------------------------------------------------------------------------------------------------------------


def recompute(part: Any, run: Run) -> None:
    s = run.plan.structure
    names = list(part.layers)
    if s.recompute == "none":
        return
    if s.recompute == "selective" and s.recompute_modules:
        if set(s.recompute_modules) != {"core_attn"}:
            raise SpecError(
                f"only core_attn is recomputed alone here, not {', '.join(s.recompute_modules)}",
                "strategy.recompute_modules",
                ["core_attn"],
            )
        for layer in part.layers.values():
            assert isinstance(layer, Table)
            op = next(o for o in layer.ops if o.kind == "attention")
            layer._put(layer.paths[op.name], checkpoint_wrapper(layer.module(op)), op.name)
    elif s.recompute == "selective":
        for name in names:
            part.layers[name] = checkpoint_wrapper(part.layers[name], context_fn=every_second_product)
    else:
        if s.recompute_every > 1:
            part.spans = tuple(tuple(names[i : i + s.recompute_every]) for i in range(0, len(names), s.recompute_every))
        else:
            for name in names:
                part.layers[name] = checkpoint_wrapper(part.layers[name])


# --- data parallelism ------------------------------------------------------------------------------------------------------------------------------


def shard(part: Any, run: Run, ranks: Ranks) -> None:
    """FSDP2 (ZeRO-2: weights stay gathered from forward to backward) or, without sharding, `replicate`: one group a layer and one for the ends."""
    s = run.plan.structure
    policy = mixed_precision(run)
    # The loss reads the logits and changes nothing in place, which is all that this warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    if s.sharding == "none":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for layer in part.layers.values():
            for module in expert_modules(layer, ranks):
                replicate(module, mesh=ranks.expert_data, mp_policy=policy)
                divide(module, ranks)
            replicate(layer, mesh=ranks.data, mp_policy=policy)
        replicate(part, mesh=ranks.data, mp_policy=policy)
        return
    zero3 = s.sharding == "zero3"
    offload = CPUOffloadPolicy(pin_memory=ranks.machine.pinned) if s.offload in ("params-cpu", "optimizer-cpu") else OffloadPolicy()
    made: dict[str, Any] = {"mesh": ranks.shards, "mp_policy": policy, "offload_policy": offload}
    for layer in part.layers.values():
        for module in expert_modules(layer, ranks):
            cut = between_or_within(ranks.expert_shards.size(-1))
            fully_shard(module, reshard_after_forward=zero3, shard_placement_fn=cut, **{**made, "mesh": ranks.expert_shards})
            divide(module, ranks)
        fully_shard(layer, reshard_after_forward=zero3, shard_placement_fn=between_or_within(ranks.shards.size(-1)), **made)
    fully_shard(part, reshard_after_forward=zero3 and s.reshard_root, **made)
    if run.plan.pp > 1 and part.layers:
        # FSDP2 gathers ahead what ran before in forward. Before a stage's first group that is another micro-batch's last one, gathered for nothing.
        layer = next(iter(part.layers.values()))
        (*expert_modules(layer, ranks), layer)[0].set_modules_to_backward_prefetch([part])


def between_or_within(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP2 cuts a stack (experts, out, in) between its experts. Where there are fewer of them than shards, some ranks would hold a whole one and the others
    none: such a stack is cut along a later dimension that divides, as torchtitan does."""

    def cut(p: nn.Parameter) -> Shard | None:
        shape = p.to_local().shape if isinstance(p, DTensor) else p.shape
        if len(shape) < 3 or shape[0] >= shards:
            return None
        return next((Shard(d) for d in range(1, len(shape)) if shape[d] % shards == 0), None)

    return cut


def expert_modules(layer: nn.Module, ranks: Ranks) -> list[Any]:
    """A layer's experts where they need a group of their own."""
    return [m for m in layer.modules() if isinstance(m, Experts)] if ranks.spreads_experts else []


def divide(module: Any, ranks: Ranks) -> None:
    """The divisor of an expert group's sum, which is not the group's size."""
    module.set_gradient_divide_factor(ranks.expert_uses)
    # Where nothing is scattered FSDP2 divides by itself, and a forced sum would divide once more.
    if ranks.plan.structure.sharding != "none" and ranks.experts["expert_shard"].size() > 1:
        module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing while it reduces


def apply(part: Decoder, run: Run, ranks: Ranks, seed: int, backend: str | None = None) -> nn.Module:
    """A freshly built part on the meta device -> initialized, laid out as the plan says, its blocks compiled by `backend`; the module to call."""
    device = ranks.machine.device
    part.to_empty(device=device)
    if part.head is not None and part.model.tied:
        part.tie()
    for name, parameter in part.named_parameters():
        alone = name == "head.lm_head.weight" and part.model.tied  # another rank holds the table whose copy this is
        initialize(f"embed.{part.model.embedding.ops[0].weights[0].name}" if alone else name, parameter, seed)
    if ranks.size("tp") > 1:
        split_over(part, run, ranks.mesh["tp"])
    if ranks.size("cp") > 1:
        context.apply(part, run, ranks)
    if run.plan.ep > 1:
        experts.apply(part, ranks.experts["ep"], run.job.moe_capacity_factor)
    elif run.job.moe_capacity_factor is not None:
        experts.limit(part, run.job.moe_capacity_factor)
    part.loss = losses.of_plan(run)
    if backend is not None:
        compile_blocks(part.layers.values(), backend)
    recompute(part, run)
    return share_data(part, run, ranks)


def share_data(part: nn.Module, run: Run, ranks: Ranks) -> nn.Module:
    """Data parallelism around a part that is laid out in every other way; the module to call."""
    device = ranks.machine.device
    if run.plan.structure.framework == "fsdp2":
        if ranks.data.size() > 1 or run.plan.structure.sharding != "none":
            shard(part, run, ranks)
        return part
    if not takes_ddp(part, run, ranks):
        return part  # `reduce.sum_gradients` sums theirs, once a step
    return nn.parallel.DistributedDataParallel(
        part,
        process_group=ranks.data.get_group(),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=cap_of(run.plan),
        init_sync=False,
        static_graph=run.plan.accumulation == 1 and run.plan.pp == 1,
    )


def takes_ddp(part: nn.Module, run: Run, ranks: Ranks) -> bool:
    """DistributedDataParallel takes no tensors that another axis splits, sees no gradient that a split backward makes later, and wants one to reduce."""
    splits = ranks.size("pp") > 1 and SCHEDULES[run.plan.structure.schedule].splits_backward
    return (
        ranks.data.size() > 1 and max(ranks.size("tp"), run.plan.ep) == 1 and not splits and any(p.requires_grad for p in part.parameters())
    )
