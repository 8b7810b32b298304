"""Small models of every kind, whose sizes do not divide by what they are cut into, and the one check that every strategy must pass."""

from __future__ import annotations

from functools import cache

from trainwright.simulate.check import Comparison, compare, make_batches
from trainwright.simulate.fsdp import Optimizer
from trainwright.simulate.layout import Layout
from trainwright.simulate.model import TinyConfig, initial
from trainwright.simulate.run import Result, train
from trainwright.simulate.traffic import expected, states_bytes

TOLERANCE = 1e-12
STEPS = 5

DENSE = TinyConfig(layers=2, hidden=12, heads=16, kv_heads=8, head_dim=2, ffn=23, vocab=29)
GPT = TinyConfig(
    layers=2,
    hidden=12,
    heads=8,
    kv_heads=8,
    head_dim=2,
    ffn=19,
    vocab=31,
    gated=False,
    norm="layer",
    positions="learned",
    bias=True,
    tied=True,
)
MOE = TinyConfig(layers=2, hidden=12, heads=8, kv_heads=8, head_dim=2, ffn=11, vocab=29, experts=9, top_k=2)
DROPS = TinyConfig(layers=2, hidden=12, heads=8, kv_heads=8, head_dim=2, ffn=11, vocab=29, experts=8, top_k=2, capacity_factor=1.0)
MODELS = {"dense": DENSE, "gpt": GPT, "moe": MOE, "drops": DROPS}


@cache
def one_device(config: TinyConfig, batch: int, length: int, steps: int, padded: bool) -> Result:
    return train(config, Layout(), make_batches(config, batch, length, steps, 0, padded), initial(config))


def check(config: TinyConfig, layout: Layout, batch: int = 9, length: int = 7, steps: int = STEPS, padded: bool = False) -> Comparison:
    """Trains under `layout`: loss, gradients and weights are one device's, copies agree, every rank's bytes and memory are the formulas'.

    Copies agree to the bit, but for tensor-parallel ranks whose buckets differ in size (their rings add in another order).
    """
    single = None if config.capacity_factor else one_device(config, batch, length, steps, padded)
    found = compare(config, layout, batch=batch, length=length, steps=steps, padded=padded, single=single)
    assert found.difference.relative < TOLERANCE, found.difference
    assert found.distributed.replica_spread <= (1e-15 if layout.tp > 1 else 0)
    if not (layout.offload == "activations" and config.experts):
        check_bytes(found, batch, length)
    return found


def check_bytes(found: Comparison, batch: int, length: int) -> None:
    counted = found.distributed.traffic.by_purpose()
    for rank in range(found.layout.world_size):
        formula = expected(
            found.config, found.layout, rank, batch=batch, length=length, steps=len(found.batches), routes=found.distributed.routing
        )
        mine = {key: by_rank[rank] for key, by_rank in counted.items() if by_rank.get(rank)}
        assert mine == formula, f"rank {rank}"
        if (
            found.layout.offload in ("none", "activations")
            and found.layout.reshard_after_forward
            and not found.layout.reduce_every_microbatch
        ):
            held = next(held for label, held in found.distributed.ledgers[rank].moments if label == "backward done")
            states = states_bytes(found.config, found.layout, rank, Optimizer())
            assert {name: held[name] for name in states} == states, f"rank {rank}"
