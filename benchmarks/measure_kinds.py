"""What `measure_memory.py` cannot build: 8-bit optimizers, losses in pieces, mixtures with a capacity, context parallelism. Same rows, same trackers.

v/bin/python benchmarks/measure_kinds.py specs.jsonl -o rows.jsonl       # one JSON object a line: {"id": ..., "spec": {...}}
v/bin/python benchmarks/measure_kinds.py rows.jsonl --check
"""

from __future__ import annotations

import contextlib
import gc
import json
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measure_memory import config_of, differences, options
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.utils._python_dispatch import _disable_current_modes

import trainwright.train.models as models
from trainwright.models import build_model
from trainwright.spec.model import ModelSpec
from trainwright.train.config import numbers_of
from trainwright.train.experts import Capped
from trainwright.train.modules import Experts, Router
from trainwright.train.program import Program, WithLoss, two_steps, world
from trainwright.train.tracker import Tracker


class Ring(torch.autograd.Function):
    """PyTorch's own ring attention around its flash kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        out, lse, _, _, _, _, seed, offset, _ = ring._scaled_dot_product_ring_flash_attention(mesh, q, k, v, 0.0, True)
        ctx.mesh = mesh
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        made = ring._scaled_dot_product_ring_flash_attention_backward(
            ctx.mesh, g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, True, seed, offset
        )
        return (*made[:3], None)


class Kinds(Program):
    """`Program` with bitsandbytes' AdamW in 8 bits (its kernels update in place: they are left out) and PyTorch's fused projection and loss."""

    def _meshes(self) -> dict[str, DeviceMesh]:
        """Context parallelism: parameters are cut over dp x cp, attention goes round cp."""
        size = self.strategy.get("cp", 1)
        if size == 1:
            return super()._meshes()
        self.seq //= size
        with _disable_current_modes():
            mesh = init_device_mesh("cpu", (self.dp, size), mesh_dim_names=("dp", "cp"))
            found = {"dp": mesh["dp", "cp"]._flatten("both"), "tp": mesh["cp"]}
            for name, one in (("dp", found["dp"]), ("cp", mesh["cp"])):
                self.tracker.axes[one.get_group().group_name] = (name, one.size())
        kind = self.strategy.get("cp_kind", "ring")
        ring.set_rotate_method("alltoall" if kind == "ring" else "allgather")
        models.attention = lambda q, k, v, _: Ring.apply(q, k, v, mesh["cp"])
        return found

    def _optimizer(self) -> None:
        if self.training.get("optimizer") != "adam8bit":
            return super()._optimizer()
        import bitsandbytes.functional as kernels
        from bitsandbytes.optim import AdamW8bit

        kernels.create_dynamic_map = lambda **kwargs: torch.empty(256)  # it reads the numbers that it makes
        kernels.optimizer_update_8bit_blockwise = kernels.optimizer_update_32bit = lambda *args, **kwargs: None
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.strategy["sharding"] == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizers = [ZeroRedundancyOptimizer(self.trained, AdamW8bit, process_group=self.ddp.process_group, lr=1e-3)]
        else:
            self.optimizers = [AdamW8bit(self.trained, lr=1e-3)]

    def wrap(self, model: Any) -> Any:
        factor, config = self.training.get("moe_capacity_factor"), self.spec["model"]
        if factor is not None:
            for layer in model.layers:
                layer.mlp = Capacity(build_model(config, "mixture"), factor, self.stored)
        return Fused(model) if self.training.get("loss") == "fused" else super().wrap(model)


class Capacity(nn.Module):
    """The trainer's router and experts, with room for so many rows an expert, in the place of transformers' mixture, whose shapes follow the data."""

    def __init__(self, model: ModelSpec, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        block = next(b for b in model.blocks.values() if b.rows("router"))
        numbers = numbers_of(model)
        within = {op.name: op for op in block.ops if op.experts and op.kind not in ("router", "dispatch", "combine")}
        self.gate = Router(block.rows("router")[0], numbers, dtype=dtype)
        self.experts = Experts(within, numbers, dtype=dtype)
        self.experts.route = Capped(factor, model.experts, None, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.gate(x.flatten(0, 1)))


class Fused(WithLoss):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, weight = self.model.hidden(ids, positions).flatten(0, 1), self.model.head.weight
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            x, weight = x.to(low), weight.to(low)
        return F.linear_cross_entropy(x, weight, labels.flatten(), options=nn.LinearCrossEntropyOptions()).float()


def measure(table: dict[str, Any], trace: bool, fake: bool = True) -> tuple[dict[str, Any], Tracker]:
    s, tracker = table["strategy"], Tracker(trace)
    with world(s.get("dp", 1) * s.get("tp", 1) * s.get("cp", 1)), FakeTensorMode() if fake else contextlib.nullcontext(), tracker:
        program = Kinds(table, tracker)
        found = two_steps(program, tracker)
        del program
    gc.collect()
    return found, tracker


def versions(spec: dict[str, Any]) -> str:
    found = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if spec["training"]["optimizer"] != "adam8bit":
        return found
    import bitsandbytes

    return f"{found}, bitsandbytes {bitsandbytes.__version__}"


def main() -> None:
    args = options(__doc__)
    for line in args.specs.read_text().splitlines():
        row = json.loads(line)
        if args.only not in row["id"]:
            continue
        measured, tracker = measure({**row["spec"], "model": config_of(row["spec"]["model"])}, args.trace is not None, not args.real)
        if args.trace:
            args.trace.write_text("\n".join(tracker.events or []) + "\n")
        print(row["id"], (differences(measured, row["measured"]) or "exact") if args.check else measured["peak_bytes"], flush=True)
        if args.out:
            new = {**row, "measured": measured, "date": date.today().isoformat(), "software": versions(row["spec"])}
            with args.out.open("a") as f:
                f.write(json.dumps(new) + "\n")


if __name__ == "__main__":
    main()
