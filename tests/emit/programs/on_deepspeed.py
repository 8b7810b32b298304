"""A user's own loop on DeepSpeed's engine: it takes the emitted JSON as it is."""

import argparse

import deepspeed
import tiny
import torch

parser = argparse.ArgumentParser()
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()
tiny.without_compiled_kernels()
deepspeed.init_distributed(dist_backend="gloo")
model = tiny.model()
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
for step in range(tiny.STEPS):
    total = torch.zeros(())
    mine = tiny.shares(step, rank, world, engine.train_micro_batch_size_per_gpu())
    assert len(mine) == engine.gradient_accumulation_steps()
    for rows in mine:
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / len(mine)
    tiny.say(step, total, rank)
print(f"stage {engine.zero_optimization_stage()} optimizer {type(engine.optimizer).__name__}", flush=True)
torch.distributed.destroy_process_group()
