"""The part of the plan that torchtitan has no flags for."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b


def plan():
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["lr"] = 0.0003
    config.parallelism.module_fqns_per_model_part = [
        [
            "tok_embeddings",
            "layers.0",
            "layers.1",
            "layers.2",
            "layers.3",
            "layers.4",
            "layers.5",
            "layers.6",
            "layers.7",
            "layers.8",
            "layers.9",
            "layers.10",
            "layers.11",
            "layers.12",
            "layers.13",
            "layers.14",
            "layers.15",
        ],
        [
            "layers.16",
            "layers.17",
            "layers.18",
            "layers.19",
            "layers.20",
            "layers.21",
            "layers.22",
            "layers.23",
            "layers.24",
            "layers.25",
            "layers.26",
            "layers.27",
            "layers.28",
            "layers.29",
            "layers.30",
            "layers.31",
            "norm",
            "lm_head",
        ],
    ]
    return config
