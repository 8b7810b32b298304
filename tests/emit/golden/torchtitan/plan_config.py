"""The part of the plan that torchtitan has no flags for."""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b


def layers(first, end):
    return [f"layers.{i}" for i in range(first, end)]


def plan():
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["lr"] = 0.0003
    config.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings", *layers(0, 16)],
        [*layers(16, 32), "norm", "lm_head"],
    ]
    return config
