"""What an optimizer holds for a moment while it steps.

Sources: torch.optim (`_single_tensor_*`, `_multi_tensor_*`), checked against allocation traces: AdamW's for-loop makes a square root and a
quotient for each tensor and keeps the quotient until the next one is there; foreach makes every square root at once; fused kernels make
nothing. A DTensor gradient that is laid out unlike its parameter (a split embedding table, norms under sequence parallelism) is
redistributed in front of each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...spec.optimizer import OPTIMIZERS
from .machine import PART, Parameter, Storage, Tensor
from .sizes import Size, times

if TYPE_CHECKING:
    from .step import Step


def step_optimizer(step: Step) -> None:
    """Replay the optimizer's allocations over all trained parameters in order."""
    setup = step.setup
    kernel = setup.job.optimizer_kernel
    misplaced = [p for p in step.parameters() if p.trained and _misplaced(step, p)] if step.fsdp is None else []
    if kernel == "for-loop" or setup.job.optimizer in ("adafactor", "muon"):
        _one_by_one(step, {id(p) for p in misplaced})
        return
    copies = 2 if kernel == "foreach" else 1  # foreach multiplies gradients with themselves: both factors are laid out
    _all(step, "optimizer", [p for p in misplaced for _ in range(copies)], _placed)
    if kernel == "foreach" and setup.job.optimizer in ("adamw", "lion"):
        _all(step, "square roots", [p for p in step.parameters() if p.trained], _temporary)


def _all(step: Step, segment: str, params: list[Parameter], make: Callable[[Step, Parameter], object]) -> None:
    """One temporary for each parameter, all alive together for a moment."""
    made = []
    for p in params:
        step.tape.at(segment, p.layer)
        made.append(make(step, p))
    step.tape.at(segment, step.after)
    step.tape.touch(segment)
    made.clear()


def _one_by_one(step: Step, misplaced: set[int]) -> None:
    copies = OPTIMIZERS[step.setup.job.optimizer].temporaries
    last: Storage | None = None
    for p in step.parameters():
        if not p.trained:
            continue
        step.tape.at("optimizer", p.layer)
        if id(p) in misplaced:
            pair = [_placed(step, p), _placed(step, p)]
            del pair
        made = [_temporary(step, p) for _ in range(copies)]
        last = made[-1] if made else None
        del made
    del last


def _temporary(step: Step, p: Parameter) -> Storage:
    return Storage(step.tape, times(_owned(step, p), step.setup.types.stepped), PART["optimizer"], "optimizer temporary")


def _owned(step: Step, p: Parameter) -> Size:
    return step.symbols.shard([p.weight]) if step.setup.sharded else p.elements


def _misplaced(step: Step, p: Parameter) -> bool:
    s = step.symbols
    if not s.tensor_parallel:
        return False
    if p.grad_elements != p.elements:
        return True
    model = step.setup.model
    norms = (w for block in (model.head, *model.blocks.values()) for op in block if op.kind != "linear" for w in op.weights)
    return s.sequence_parallel and len(p.weight.shape) == 1 and s.splits(p.weight) is None and any(p.weight is w for w in norms)


def _placed(step: Step, p: Parameter) -> Tensor:
    """A gradient in its parameter's layout: a part copied out, or partial sums all-reduced."""
    return step.run.new(p.elements, step.setup.types.stored, "gradient laid out", "gradients")
