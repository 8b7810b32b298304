"""Which layers stand on which pipeline stage.

A model of L layers is L + 2 slots (embedding and head take one each) dealt over pp x virtual_stages stages: each gets the floor or the ceiling of
(L + 2) / stages slots, larger ones first; the first stage's slots include the embedding, the last one's the head. Megatron and DeepSpeed give
every stage the same number of layers where that divides (`Framework.even_stages`). Stage k of chunk c stands on rank k of pp ("round-robin") or, in
V placement, on the mirrored rank in every second chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SpecError


def layers_per_stage(layers: int, stages: int, given: Sequence[int] | None = None, even: bool = False) -> list[int]:
    """Layers on each of `stages` stages, first to last. `given` overrides and must sum to `layers`; `even`: the same number on each where that divides."""
    if given is not None:
        if len(given) != stages or sum(given) != layers:
            raise SpecError(f"{list(given)[:16]} does not deal {layers} layers over {stages} stages", "strategy.layers_per_stage")
        return list(given)
    if stages == 1 or (even and layers % stages == 0):
        return [layers // stages] * stages
    slots, larger = divmod(layers + 2, stages)
    counts = [slots + (k < larger) for k in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 0:
        raise SpecError(f"{layers} layers and two ends are too few for {stages} stages", "strategy.pp")
    return counts


def layers_of_rank(counts: Sequence[int], pp: int, v_shape: bool = False) -> list[list[range]]:
    """For each pipeline rank the ranges of layers of its chunks."""
    starts = [sum(counts[:k]) for k in range(len(counts) + 1)]
    ranks: list[list[range]] = [[] for _ in range(pp)]
    for k in range(len(counts)):
        chunk, position = divmod(k, pp)
        rank = pp - 1 - position if v_shape and chunk % 2 else position
        ranks[rank].append(range(starts[k], starts[k + 1]))
    return ranks
