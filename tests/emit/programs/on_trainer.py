"""A user's own program on Hugging Face's Trainer: it takes the emitted arguments as they are."""

import json
import os
import sys
from pathlib import Path

import tiny
import torch

engine = os.environ["ENGINES"]
if engine != "ddp":
    tiny.accelerator_without_gpu()
if engine == "deepspeed":
    tiny.without_compiled_kernels()
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments  # noqa: E402


class Said(TrainerCallback):
    """Prints every step's loss unrounded."""

    total = torch.zeros(())

    def on_step_end(self, arguments, state, control, **kwargs):
        tiny.say(state.global_step - 1, self.total, arguments.process_index)
        self.total = torch.zeros(())


class InOrder(Trainer):
    """Sequences in the order of their numbers, so that a step is the same one on any number of processes."""

    said = Said()

    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.said.total = self.said.total + loss.detach()
        return loss


given = json.loads(Path(sys.argv[1]).read_text()) | ({"use_cpu": True} if engine == "ddp" else {})
(arguments,) = HfArgumentParser(TrainingArguments).parse_dict(given)
rows = [{"input_ids": row, "labels": row.clone()} for row in tiny.sequences(0, tiny.BATCH * tiny.STEPS)]
trainer = InOrder(model=tiny.model(), args=arguments, train_dataset=rows)
trainer.add_callback(trainer.said)
trainer.train()
if arguments.process_index == 0:
    print(f"type {trainer.accelerator.distributed_type.value} model {type(trainer.model_wrapped).__name__}", flush=True)
torch.distributed.destroy_process_group()
