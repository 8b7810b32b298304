"""What a run needs and a plan does not say, each option with its sentence; the command line, the files of a run and the tests read this one list."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError, unknown


def option(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True)
class Settings:
    """Frozen; `from_dict` checks kinds and ranges, so that a wrong value is one line before anything starts."""

    steps: int = option(100, "optimizer steps of the whole run", 1, 10**9)
    learning_rate: float = option(3e-4, "peak learning rate", 0, 10)
    min_learning_rate: float = option(3e-5, "where the cosine ends", 0, 10)
    warmup_steps: int = option(10, "steps of linear warm-up", 0, 10**9)
    weight_decay: float = option(0.1, "AdamW's decay of matrices; norms and biases have none", 0, 1)
    beta1: float = option(0.9, "first moment", 0, 0.9999)
    beta2: float = option(0.95, "second moment", 0, 0.999999)
    eps: float = option(1e-8, "AdamW's epsilon", 1e-20, 1)
    momentum: float = option(0.95, "of SGD with momentum and of Muon", 0, 0.9999)
    clip: float = option(1.0, "norm that the whole gradient is clipped to; 0 = not at all", 0, 1e9)
    router_balance: float = option(0.0, "weight of the loss that evens out the use of experts; 0 = none (Switch: 0.01)", 0, 100)
    loss_scale: float = option(65536.0, "first loss scale of fp16", 1, 2**40)
    seed: int = option(0, "of initial weights and of the order of the data", 0, 2**31 - 1)
    data: str = option("", "a file, folder or pattern of text or JSON lines, or a token file; empty: the text that is part of the package")
    tokenizer: str = option("", "a tokenizer.json; empty: bytes")
    output: str = option("runs/run", "folder of checkpoints and metrics")
    init: str = option("", "a folder of safetensors in Hugging Face's layout to begin with")
    export: str = option("", "a folder that gets the trained model in Hugging Face's layout at the end")
    save_every: int = option(0, "steps between checkpoints; 0 = only at the end", 0, 10**9)
    keep: int = option(3, "checkpoints that are kept", 1, 10**6)
    resume: bool = option(True, "go on from the last whole checkpoint in the output folder")
    log_every: int = option(1, "steps between lines of metrics", 1, 10**9)
    timeout_s: float = option(600.0, "longest time that a collective may take", 1, 10**6)
    spike: float = option(0.0, "stop where a loss exceeds the mean of the last 20 by this factor; 0 = never", 0, 1e6)
    model_from: str = option("", "package.module:function that returns an nn.Module to train in place of the plan's own")
    compile: str = option("auto", "torch.compile of every block: auto (as the plan says, on a GPU), off, or a backend such as inductor")
    profile: bool = option(False, "write a trace of two steps with the predicted timeline beside it")
    tensorboard: bool = option(False, "write TensorBoard's files too")
    engine: str = option("", "native (PyTorch) or deepspeed; empty: what the plan's framework names")
    device: str = option("auto", "auto, cpu or cuda")
    deterministic: bool = option(False, "only kernels that give the same bits every time")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check(f, getattr(self, f.name))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Settings:
        names = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("setting", name, names, "settings")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: linear warm-up, then half a cosine to `min_learning_rate` at the last step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        low = min(self.min_learning_rate, self.learning_rate)
        span = max(1, self.steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return low + (self.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * done))


def _check(f: dataclasses.Field[Any], value: Any) -> None:
    kind = type(f.default)
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise SpecError(
            f"{str(value)[:60]!r} is not {({'int': 'a whole number', 'float': 'a number', 'bool': 'true or false'}).get(kind.__name__, 'a text')}",
            f.name,
        )
    low, high = f.metadata.get("low"), f.metadata.get("high")
    if low is not None and not (math.isfinite(value) and low <= value <= high):
        raise SpecError(f"{value} is not between {low:g} and {high:g}", f.name, [low if value < low else high])
