"""Activation recomputation: what is thrown away in forward and computed again in backward.

    none       every layer keeps its inputs
    selective  the attention probabilities are dropped and computed again from q and k (they are the batch x heads x length^2 part)
    full       only the input of every K-th block is kept; backward first runs the K blocks forward again

Same gradients to the last bit; the price of `full` is one more forward: a third more than forward + backward = 3. Chen et al. 2016, Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import blocks, layers
from .collectives import split_sizes
from .layout import Layout
from .model import TinyConfig, local_heads

if TYPE_CHECKING:
    from .run import Micro, Run


def saved_elements(config: TinyConfig, layout: Layout, tokens: int, length: int, tp_rank: int = 0, dropped: bool = False) -> int:
    """Elements that forward of one dense block leaves on tensor-parallel rank `tp_rank` for `tokens` tokens in sequences of `length` (both local).

    Two norms keep their input and one number a token (LayerNorm two), and their results feed the products: 4 h + 2, on all ranks alike, or of a share
    of the tokens under sequence parallelism. Heads and feed-forward columns split over tp: q and the attention's result 2 a d, k and v 2 k d, a log-sum a
    head a; gate, up and their product 3 f (2 f without a gate). Without flash attention the probabilities, a x length, more. A dropped block keeps h.
    """
    share = split_sizes(tokens, layout.tp)[tp_rank] if layout.sequence_parallel else tokens
    if dropped:
        return share * config.hidden
    heads, kv_heads = local_heads(config, layout.tp, tp_rank)
    ffn = split_sizes(config.ffn, layout.tp)[tp_rank]
    split = 2 * (heads + kv_heads) * config.head_dim + heads + (3 if config.gated else 2) * ffn
    if not layout.flash and layout.recompute != "selective":
        split += heads * length
    return share * (4 * config.hidden + 2 * norm_numbers(config)) + tokens * split


def norm_numbers(config: TinyConfig) -> int:
    """Numbers a token that a norm keeps beside its input."""
    return 1 if config.norm == "rms" else 2


def saved_elements_of_head(config: TinyConfig, layout: Layout, tokens: int, tp_rank: int = 0) -> int:
    """Elements that the final norm and the loss leave: 2 h + 1 a token, and the softmax over this rank's part of the vocabulary."""
    share = split_sizes(tokens, layout.tp)[tp_rank] if layout.sequence_parallel else tokens
    return share * (2 * config.hidden + norm_numbers(config)) + tokens * split_sizes(config.vocab, layout.tp)[tp_rank]


def segments(config: TinyConfig, layout: Layout, units: Sequence[int]) -> list[list[int]]:
    """Units that are dropped and recomputed together; embedding and head always stand alone."""
    every = layout.recompute_every if layout.recompute == "full" else 1
    found: list[list[int]] = []
    for unit in units:
        inner = 0 < unit < config.head_unit
        if inner and found and found[-1][0] > 0 and len(found[-1]) < every:
            found[-1].append(unit)
        else:
            found.append([unit])
    return found


def _run_units(run: Run, units: Sequence[int], x: Any, micro: Micro) -> tuple[Any, list[blocks.Backward]]:
    backwards = []
    for unit in units:
        run.store.gather(unit)
        x, backward = blocks.unit(run, unit, x, micro)
        run.store.release(unit)
        run.count_forward(unit)
        backwards.append(backward)
    return x, backwards


def segment(run: Run, units: Sequence[int], x: Any, micro: Micro) -> tuple[Any, blocks.Backward, int]:
    """(result, backward, bytes that forward leaves behind): one segment with its weights gathered and freed around it."""
    drop = run.layout.recompute == "full" and 0 < units[0] < run.config.head_unit
    y, backwards = _run_units(run, units, x, micro)
    if drop:
        backwards.clear()
    kept = x.nbytes if drop else layers.saved_bytes(backwards)
    if not drop:
        x = None

    def backward(dy: Any) -> Any:
        if drop:
            for unit in units[:1] if len(units) == 1 else ():
                run.store.gather(unit)  # stays whole from the recomputation to the end of its backward
            _, again = _run_units(run, units, x, micro)
            extra = layers.saved_bytes(again) - kept
            run.ledger.hold("activations", extra)
        else:
            again, extra = backwards, 0
        for unit, unit_backward in zip(reversed(units), reversed(again)):
            if not (drop and len(units) == 1):
                run.store.gather(unit)
            dy = unit_backward(dy)
            run.store.release(unit)
            run.unit_done(unit)
        run.ledger.free("activations", extra)
        return dy

    return y, backward, kept
