"""The shortest honest PyTorch training loop for a Llama and each layout, as one writes it without a framework: what the trainer is timed against.

`loop(layout, config, tokens, ...)` yields after every optimizer step. It reads its data from the same token file, clips, steps fused AdamW and reads its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, d = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
        self.d = d
        self.q_proj = nn.Linear(h, h, bias=False)
        self.k_proj = nn.Linear(h, c["num_key_value_heads"] * d, bias=False)
        self.v_proj = nn.Linear(h, c["num_key_value_heads"] * d, bias=False)
        self.o_proj = nn.Linear(h, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (y * cos + torch.cat((-y[..., self.d // 2 :], y[..., : self.d // 2]), -1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, f = c["hidden_size"], c["intermediate_size"]
        self.norm1, self.norm2 = nn.RMSNorm(h, 1e-6), nn.RMSNorm(h, 1e-6)
        self.attention = Attention(c)
        self.gate, self.up, self.down = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """All of the layers, or those of a pipeline stage with the embedding or the head where they belong."""

    def __init__(self, c: dict[str, Any], tokens: int, layers: range | None = None) -> None:
        super().__init__()
        n, h, d = c["num_hidden_layers"], c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
        layers = range(n) if layers is None else layers
        self.embed = nn.Embedding(c["vocab_size"], h) if 0 in layers else None
        self.layers = nn.ModuleList(Layer(c) for _ in layers)
        self.norm = nn.RMSNorm(h, 1e-6) if n - 1 in layers else None
        self.head = nn.Linear(h, c["vocab_size"], bias=False) if n - 1 in layers else None
        angles = torch.outer(torch.arange(tokens).float(), 10000 ** -(torch.arange(0, d, 2).float() / d)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def split(model: Llama) -> Llama:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    for layer in model.layers:
        names = {f"attention.{n}_proj": column for n in "qkv"} | {"attention.o_proj": row, "gate": column, "up": column, "down": row}
        parallelize_module(layer, mesh, names)
    from torch.distributed.tensor import Replicate

    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, ends)


def loop(layout: str, c: dict[str, Any], data: np.ndarray, *, seq_len: int, sequences: int, micro_batch: int) -> Iterator[float]:
    """Yields the loss of each step. `sequences` of this replica a step, `micro_batch` of them a forward pass of the pipeline."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    per_stage = c["num_hidden_layers"] // size
    model = Llama(c, seq_len, range(rank * per_stage, (rank + 1) * per_stage) if layout == "pp" else None)
    call: Callable[[torch.Tensor], torch.Tensor] = model
    if layout == "ddp":
        call = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif layout == "zero3":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif layout == "tp":
        split(model)
    elif layout == "pp":
        stage = PipelineStage(model, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, sequences // micro_batch, loss_fn=loss_of)
    plain = [p for p in model.parameters() if layout != "tp" or not hasattr(p, "device_mesh")]
    rest = [p for p in model.parameters() if all(p is not q for q in plain)]
    optimizer = torch.optim.AdamW([{"params": g} for g in (plain, rest) if g], lr=3e-4, fused=True)
    order = np.random.default_rng(0 if layout in ("tp", "pp") else rank)
    while True:
        starts = order.integers(0, len(data) - seq_len - 1, sequences)
        rows = torch.from_numpy(np.stack([data[s : s + seq_len + 1] for s in starts]).astype(np.int64))
        ids, labels = rows[:, :-1], rows[:, 1:]
        if layout == "pp":
            losses: list[torch.Tensor] = []
            first, last = rank == 0, rank == size - 1
            schedule.step(*([ids] if first else []), **({"target": labels, "losses": losses} if last else {}), return_outputs=False)
            loss = torch.stack(losses).mean() if last else torch.zeros(())
        else:
            loss = loss_of(call(ids), labels)
            loss.backward()
        clip(layout, list(model.parameters()), plain, rest)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def clip(layout: str, every: list[nn.Parameter], plain: list[nn.Parameter], rest: list[nn.Parameter]) -> None:
    """`clip_grad_norm_` where it is right as it is; over stages, and over a mix of plain and split weights, its two halves with the sum between."""
    if layout not in ("tp", "pp"):
        nn.utils.clip_grad_norm_(every, 1.0)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in g if p.grad is not None]) for g in (plain, rest) if g]
    total = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).square().sum()
    if layout == "pp":
        dist.all_reduce(total)
    for g in (plain, rest):
        if g:
            nn.utils.clip_grads_with_norm_(g, 1.0, total.sqrt())
