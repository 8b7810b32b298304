"""What the programs of this folder train: a small model from one seed on sequences known by their number, and what one process makes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import get_cosine_schedule_with_warmup

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 128,
}  # fmt: skip
LENGTH, BATCH, STEPS = 32, 8, 3
TEXT = (
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of outrageous fortune. " * 8
)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def sequences(first: int, count: int) -> torch.Tensor:
    """[count, LENGTH] bytes of the text, from sequence number `first` of the run."""
    return torch.stack([torch.tensor(list(TEXT.encode()[i * 31 : i * 31 + LENGTH])) for i in range(first, first + count)])


def shares(step: int, rank: int, world: int, micro: int) -> list[torch.Tensor]:
    """The micro-batches of one rank in one step; all ranks together see the step's `BATCH` sequences once."""
    each = BATCH // (world * micro)
    return [sequences(step * BATCH + (i * world + rank) * micro, micro) for i in range(each)]


def alone(
    lr: float, betas: tuple[float, float], weight_decay: float, clip: float, cosine: bool = False, decays_norms: bool = True
) -> list[float]:
    """The losses of `STEPS` steps of one process that sees the whole batch at once."""
    torch.set_num_threads(1)
    lm = model()
    norms = [] if decays_norms else [p for p in lm.parameters() if p.ndim == 1]
    others = [p for p in lm.parameters() if decays_norms or p.ndim > 1]
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, STEPS) if cosine else None
    losses = []
    for step in range(STEPS):
        rows = sequences(step * BATCH, BATCH)
        loss = lm(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def say(step: int, loss: torch.Tensor, rank: int) -> None:
    """Every rank calls it with its own mean loss of the step; rank 0 prints the mean of all."""
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    if rank == 0:
        print(f"step {step + 1} loss {float(total) / torch.distributed.get_world_size():.7f}", flush=True)


def options() -> dict[str, Any]:
    """What a plan does not hold and the test chose: options.json beside this file."""
    return dict(json.loads((Path(__file__).parent / "options.json").read_text()))


def accelerator_without_gpu() -> None:
    """Accelerate has FSDP and DeepSpeed for accelerators only, and nothing but plain DDP on a CPU. Here its ranks take themselves for GPUs that speak gloo;
    the device is the CPU (ACCELERATE_TORCH_DEVICE). Everything after that is Accelerate's own."""
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda *a, **k: ("gloo", DistributedType.MULTI_GPU)


def without_compiled_kernels() -> None:
    """DeepSpeed would compile its collectives over shared memory, minutes on a CPU: gloo does them."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
