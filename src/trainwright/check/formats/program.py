"""Any other training program on a command line: what its options say under the names that most programs use (OpenRLHF, DeepSpeed-Chat, own scripts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..document import Document
from ..setup import Reading
from . import Format, trainer
from ._facts import FRAMEWORK, Facts, launched, number, share, text, whole
from .deepspeed import stage

OPENRLHF = (
    "micro_train_batch_size",
    "pretrain",
    "zero_stage",
    "max_len",
    "micro_rollout_batch_size",
    "actor_learning_rate",
    "save_path",
    "train_batch_size",
)


def recognizes(document: Document) -> float:
    return 0.3 if launched(document, "program") else 0.0


def recognizes_openrlhf(document: Document) -> float:
    return 0.85 if launched(document, "program") and share(document, OPENRLHF) >= 3 else 0.0


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    return _read(document, "program")


def read_openrlhf(document: Document, context: Mapping[str, Any]) -> Reading:
    return _read(document, "openrlhf")


def _read(document: Document, name: str) -> Reading:
    facts = Facts(document, rank=2)
    trainer.say(facts)
    facts.table(
        (
            (
                "strategy.micro_batch_size",
                whole,
                ("micro_train_batch_size", "micro_batch_size", "batch_size_per_device", "train_micro_batch_size_per_gpu"),
            ),
            ("training.learning_rate", number, ("lr", "actor_learning_rate")),
            ("strategy.sharding", stage, ("zero_stage", "actor_zero_stage")),
            ("model.name", text, ("actor_model_name_or_path",)),
            ("training.seq_len", whole, ("max_seq_len",)),
        )
    )
    if name == "openrlhf":
        facts.take("training.global_batch_size", whole, "train_batch_size")
        facts.say(FRAMEWORK, "deepspeed", facts.path("zero_stage") or facts.path("pretrain"))
    return facts.reading(name, fragment=True)


FORMAT = (
    Format("openrlhf", "OpenRLHF", recognizes_openrlhf, read_openrlhf, ("open-rlhf",), "OpenRLHF/OpenRLHF openrlhf/cli"),
    Format("program", "training program", recognizes, read, ("script",), ""),
)
