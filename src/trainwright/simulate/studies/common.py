"""What the studies share: small models, and the tables that every comparison shows."""

from __future__ import annotations

from typing import Annotated, Any

from ...errors import SpecError, unknown
from .. import traffic
from ..check import Comparison
from ..model import TinyConfig
from ..report import Table

Ranks = Annotated[int, "Virtual ranks."]
Batch = Annotated[int, "Sequences of the global batch; need not divide."]
Length = Annotated[int, "Tokens of a sequence; need not divide."]
Steps = Annotated[int, "Optimizer steps."]
Seed = Annotated[int, "Seed of weights and tokens."]
Model = Annotated[str, "dense (RMSNorm, rotary, GQA, SwiGLU), gpt (LayerNorm, learned positions, biases, GELU, tied head) or moe."]
Layers = Annotated[int, "Transformer blocks."]
Micro = Annotated[int, "Microbatches of a step on each data-parallel rank."]
ScheduleName = Annotated[str, "Pipeline schedule."]

MOST_PARAMETERS = 2_000_000
MOST_TOKENS = 2**14

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "gpt": {"gated": False, "norm": "layer", "positions": "learned", "bias": True, "tied": True, "kv_heads": 8, "heads": 8, "head_dim": 4},
    "moe": {"experts": 8, "top_k": 2, "ffn": 32},
}


def model(name: str, **changes: Any) -> TinyConfig:
    """The small model of that name; `changes` set single fields. Raises `SpecError` for an unknown name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS, "model")
    base = {"layers": 4, "hidden": 32, "heads": 16, "kv_heads": 8, "head_dim": 4, "ffn": 48, "vocab": 67, "max_length": 4096}
    limited(changes.get("layers", 1), 128, "layers")
    config = TinyConfig(**{**base, **MODELS[name], **changes})
    if config.parameter_count > MOST_PARAMETERS:
        raise SpecError(f"{config.parameter_count:,} parameters are more than a simulation takes ({MOST_PARAMETERS:,})", "model")
    return config


def limited(value: int, most: int, where: str, least: int = 1) -> int:
    """`value`, or `SpecError` where it is not in the range that is simulated in seconds."""
    if not isinstance(value, int) or not least <= value <= most:
        raise SpecError(
            f"{value} is outside of {least} to {most}", where, [min(max(value, least), most)] if isinstance(value, int) else [least]
        )
    return value


def check_sizes(world: int, batch: int, length: int, steps: int) -> None:
    limited(world, 64, "ranks")
    limited(batch, 4096, "batch")
    limited(length, 4096, "length")
    limited(steps, 1000, "steps")
    if batch * length * steps > MOST_TOKENS:
        raise SpecError(
            f"{batch} x {length} tokens x {steps} steps are more than a simulation takes",
            "steps",
            [max(1, MOST_TOKENS // (batch * length))],
        )


def against_one_device(c: Comparison) -> Table:
    """Loss, gradients and weights beside one device's."""
    d, last = c.difference, len(c.batches)
    rows = [
        {
            "after step": last,
            "what": "loss",
            "this layout": c.distributed.losses[-1],
            "one device": c.single.losses[-1],
            "relative error": d.loss,
        },
        {
            "after step": last,
            "what": "gradients (largest tensor error)",
            "this layout": None,
            "one device": None,
            "relative error": d.gradients,
        },
        {
            "after step": last,
            "what": "weights (largest tensor error)",
            "this layout": None,
            "one device": None,
            "relative error": d.weights,
        },
        {
            "after step": last,
            "what": "copies of a weight on different ranks",
            "this layout": None,
            "one device": None,
            "relative error": c.distributed.replica_spread,
        },
    ]
    return Table("Against one device", rows)


def expected_bytes(c: Comparison) -> list[traffic.Table]:
    """Each rank's formulas for the comparison's whole run."""
    batch, length = c.batches[0].shape
    return [
        traffic.expected(c.config, c.layout, rank, batch=batch, length=length, steps=len(c.batches), routes=c.distributed.routing)
        for rank in range(c.layout.world_size)
    ]


PURPOSES = {
    "tp": "activations, tensor parallel",
    "tp loss": "vocabulary-parallel loss",
    "tp partial": "gradients of what all tensor ranks hold",
    "tp copies": "gradients of shared key-value heads",
    "cp": "keys and values",
    "ep": "tokens to experts",
    "ep counts": "rows per expert",
    "pp": "stage boundaries",
    "weights": "weights",
    "gradients": "gradients",
    "replicas": "gradient shards over replicas",
    "twins": "copies on other stages",
    "loss": "loss and token count",
    "norm": "norm of the gradient",
    "host": "host link",
}


def bytes_table(c: Comparison) -> tuple[Table, bool]:
    """Bytes per step by purpose: counted against the formula, and whether every rank's are equal."""
    want = expected_bytes(c)
    got = c.distributed.traffic.by_purpose()
    keys = sorted({k for table in want for k in table} | {k for k, by_rank in got.items() if any(by_rank.values())})
    rows, equal, steps = [], True, len(c.batches)
    for key in keys:
        counted = [got.get(key, {}).get(rank, 0) for rank in range(c.layout.world_size)]
        formula = [table.get(key, 0) for table in want]
        same = counted == formula
        equal &= same
        rows.append(
            {
                "purpose": PURPOSES.get(key[0], key[0]),
                "collective": key[1].replace("_", "-"),
                "rank 0": counted[0] // steps,
                "least": min(counted) // steps,
                "most": max(counted) // steps,
                "formula, all": sum(formula) // steps,
                "counted, all": sum(counted) // steps,
                "equal": "yes" if same else "NO",
            }
        )
    return Table("Bytes a rank sends in a step, counted against the formula", rows), equal


def figures(c: Comparison, equal: bool) -> dict[str, Any]:
    """The numbers that every comparison reports."""
    d = c.difference
    return {
        "ranks": c.layout.world_size,
        "steps": len(c.batches),
        "parameters": c.config.parameter_count,
        "losses": c.distributed.losses,
        "relative_error": {"loss": d.loss, "gradients": d.gradients, "weights": d.weights},
        "absolute_error_weights": d.absolute,
        "replica_spread": c.distributed.replica_spread,
        "bytes_equal_formula": equal,
        "bytes_sent": c.distributed.traffic.total_bytes,
        "messages": c.distributed.traffic.messages,
        "bytes_sent_by_rank": [c.distributed.traffic.bytes_by_rank().get(r, 0) for r in range(c.layout.world_size)],
        "peak_device_bytes_by_rank": [ledger.peak for ledger in c.distributed.ledgers],
    }
