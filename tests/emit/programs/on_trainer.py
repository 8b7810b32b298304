"""A user's own program on Hugging Face's Trainer: it takes the emitted arguments as they are."""

import os
import sys

import tiny
import torch

tiny.accelerator_without_gpu()
if "deepspeed" in os.environ.get("ENGINES", ""):
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


(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])
rows = [{"input_ids": row, "labels": row.clone()} for row in tiny.sequences(0, tiny.BATCH * tiny.STEPS)]
trainer = InOrder(model=tiny.model(), args=arguments, train_dataset=rows)
trainer.add_callback(trainer.said)
trainer.train()
if arguments.process_index == 0:
    print(f"type {trainer.accelerator.distributed_type.value} model {type(trainer.model_wrapped).__name__}", flush=True)
torch.distributed.destroy_process_group()
