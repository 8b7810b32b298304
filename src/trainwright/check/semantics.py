"""What engines do without being told, where they differ: the differences that no key of a file shows.

`HABITS[engine][topic]` is one phrase; a conversion names every topic on which the two engines have different ones. Looked up: how
transformers 5.24 (trainer.py: num_items_in_batch) and torchtitan 0.3 (trainer.py: global_valid_tokens) weigh tokens, DeepSpeed 0.19.8's loss scale, how often
Accelerate 1.15 steps a scheduler; seen in losses of real runs: which parameters the Trainer, DeepSpeed and the script decay. The rest, Megatron's and the
optimizers' defaults, is the engines' documented behavior, not read again for this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOKENS = "every target token of the global batch weighs alike"
MEANS = "the mean of each micro-batch; micro-batches weigh alike, however many tokens they hold"
OWN = "what the training program does"
DECAY, NO_DECAY = "as every parameter, unless the program passes groups", "none"

HABITS: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "loss over accumulated micro-batches": TOKENS,
        "fp16 loss scale": "dynamic from 65,536, doubled after 2,000 steps",
        "weight decay of norms and biases": NO_DECAY,
    },
    "deepspeed": {
        "loss over accumulated micro-batches": MEANS,
        "fp16 loss scale": "dynamic from 65,536, doubled after 1,000 steps",
        "weight decay of norms and biases": DECAY,
    },
    "megatron": {
        "loss over accumulated micro-batches": MEANS,
        "fp16 loss scale": "dynamic from 4,294,967,296, doubled after 1,000 steps",
        "weight decay of norms and biases": NO_DECAY,
    },
    "torchtitan": {
        "loss over accumulated micro-batches": TOKENS,
        "fp16 loss scale": "none: it trains in bf16",
    },
    "fsdp": {
        "loss over accumulated micro-batches": MEANS,
        "fp16 loss scale": "dynamic from 65,536, doubled after 2,000 steps",
        "weight decay of norms and biases": DECAY,
    },
    "accelerate": {
        "loss over accumulated micro-batches": MEANS,
        "steps of a scheduler": f"{OWN}; a prepared scheduler moves on by one step for each process",
        "fp16 loss scale": "dynamic from 65,536, doubled after 2,000 steps",
    },
}


@dataclass(frozen=True)
class Adam:
    """What an engine takes where its file says nothing."""

    betas: tuple[float, float]
    weight_decay: float
    clip: float  # 0 = none


ADAM: Mapping[str, Adam] = {
    "trainer": Adam((0.9, 0.999), 0.0, 1.0),
    "deepspeed": Adam((0.9, 0.999), 0.0, 0.0),
    "megatron": Adam((0.9, 0.999), 0.01, 1.0),
    "torchtitan": Adam((0.9, 0.95), 0.1, 1.0),
    "fsdp": Adam((0.9, 0.95), 0.1, 1.0),
}
# How the learning rate falls where the files say nothing: to 0, without warm-up.
RATE: Mapping[str, str] = {"trainer": "linear", "deepspeed": "constant", "megatron": "linear", "fsdp": "constant"}
FP16_ONLY = ("fp16 loss scale",)
# Formats that another engine runs.
ENGINE_OF: Mapping[str, str] = {
    "trainer": "trainer", "trl": "trainer", "axolotl": "trainer", "llama_factory": "trainer", "accelerate": "accelerate", "deepspeed": "deepspeed",
    "megatron": "megatron", "nemo": "megatron", "primus": "megatron", "torchtitan": "torchtitan", "fsdp": "fsdp", "gpt_neox": "deepspeed",
}  # fmt: skip
ORDER = ("trainer", "trl", "axolotl", "llama_factory", "megatron", "nemo", "primus", "torchtitan", "gpt_neox", "deepspeed", "accelerate")


def engine_of(formats: Iterable[str]) -> str | None:
    """The engine whose loop trains, of all formats of a set: a Trainer that hands DeepSpeed its JSON is a Trainer."""
    found = set(formats)
    return next((ENGINE_OF[f] for f in ORDER if f in found), None)


def differences(before: str | None, after: str | None, fp16: bool) -> list[tuple[str, str, str]]:
    """(topic, what the first engine does, what the second does) where they differ; an engine that is not known is said to be so."""
    new = HABITS.get(after or "", {})
    old = HABITS.get(before or "", {})
    topics = [t for t in new if fp16 or t not in FP16_ONLY]
    return [(t, old.get(t, f"not known of {before or 'this format'}"), new[t]) for t in topics if old.get(t) != new[t]]


__all__ = ["ADAM", "HABITS", "RATE", "Adam", "differences", "engine_of"]
