"""Activation recomputation: memory against computation, and the same gradients."""

from __future__ import annotations

from typing import Annotated, Any

from ..check import compare, relative
from ..layout import Layout
from ..model import initial
from ..recompute import saved_elements, saved_elements_of_head
from ..report import Report, Table
from ..run import Result, train
from . import Study
from .common import Batch, Layers, Length, Model, Seed, Steps, check_sizes, limited, model


def _kept(result: Result) -> int:
    """What forward left behind when the first backward began."""
    return next(held["activations"] for label, held in result.ledgers[0].moments if label.endswith("F0"))


def recompute(
    layers: Layers = 8,
    every: Annotated[int, "Blocks between kept inputs, for the last row."] = 2,
    batch: Batch = 2,
    length: Length = 32,
    steps: Steps = 2,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """Nothing, the attention probabilities, or whole blocks thrown away in forward and computed again in backward.

    Attention runs without flash here, so that its probabilities show.
    """
    check_sizes(1, batch, length, steps)
    config = model(model_name, layers=limited(layers, 64, "layers"))
    modes = {"none": {}, "selective": {"recompute": "selective"}, "full": {"recompute": "full"}}
    for k in sorted({limited(every, layers, "every"), round(layers**0.5), layers} - {1}):
        modes[f"every {k}"] = {"recompute": "full", "recompute_every": k}
    first = compare(config, Layout(flash=False), batch=batch, length=length, steps=steps, seed=seed)
    rows, spread = [], 0.0
    for name, mode in modes.items():
        layout = Layout(flash=False, **mode)  # type: ignore[arg-type]
        result = train(config, layout, first.batches, initial(config, seed))
        formula = _formula(config, layout, batch * length, length)
        error = max(relative(result.gradients, first.single.gradients)[0], relative(result.weights, first.single.weights)[0])
        spread = max(spread, error)
        blocks = sum(n for unit, n in result.forwards[0].items() if 0 < unit < config.head_unit)
        extra = blocks / (layers * steps) - 1
        rows.append(
            {
                "recompute": name,
                "kept after forward (bytes)": _kept(result),
                "formula": formula,
                "peak activations (bytes)": result.ledgers[0].most["activations"],
                "extra block forwards": extra,
                "extra compute": extra / 3,
                "difference of gradients": error,
            }
        )
    return Report(
        f"Recomputation in {layers} blocks",
        [Table("Memory against computation", rows)],
        {"rows": rows, "largest_difference": spread},
        [
            "Backward costs two forwards, so one more forward is a third more computation; selective recomputes only the attention core.",
            "Every K-th input is L/K inputs, and backward holds K blocks at a time: the sum is smallest near K = sqrt(L x input / all a block saves).",
        ],
    )


def _formula(config: Any, layout: Layout, tokens: int, length: int) -> int | None:
    """Bytes by the formulas of `recompute`: every block, or the inputs of every K-th, and the head."""
    if config.experts:
        return None
    drop = layout.recompute == "full"
    count = -(-config.layers // layout.recompute_every) if drop else config.layers
    return 8 * (count * saved_elements(config, layout, tokens, length, dropped=drop) + saved_elements_of_head(config, layout, tokens))


STUDY = Study("recompute", recompute, "trainwright simulate recompute --layers 8 --every 3", ("checkpointing", "activation-checkpointing"))
