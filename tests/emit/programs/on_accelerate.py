"""A user's own loop on Accelerate: it takes what `accelerate launch` read in the emitted YAML."""

import os

import tiny
import torch

engine = os.environ["ENGINES"]
if engine == "ddp":
    os.environ["ACCELERATE_USE_CPU"] = "true"
else:
    tiny.accelerator_without_gpu()
if engine == "deepspeed":
    tiny.without_compiled_kernels()
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DummyOptim  # noqa: E402

chosen = tiny.options()
accelerator = Accelerator()
on_deepspeed = accelerator.distributed_type == "DEEPSPEED"
model = tiny.model()
if on_deepspeed:  # the JSON names the optimizer
    optimizer = DummyOptim(model.parameters())
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen["lr"], betas=chosen["betas"], weight_decay=chosen["weight_decay"])
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(tiny.STEPS):
    total = torch.zeros(())
    mine = tiny.shares(step, accelerator.process_index, accelerator.num_processes, chosen["micro"])
    assert len(mine) == accelerator.gradient_accumulation_steps
    for rows in mine:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), chosen["clip"])
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / len(mine)
    tiny.say(step, total, accelerator.process_index)
accelerator.print(f"type {accelerator.distributed_type.value} model {type(model).__name__}")
accelerator.end_training()
