"""Offload to the host: what moves, and at which bandwidth it hides."""

from __future__ import annotations

from typing import Annotated, Any

from ...errors import SpecError
from ..check import Comparison, compare
from ..layout import Layout
from ..offload import transfers
from ..report import Report, Table
from . import Study
from .common import Batch, Length, Ranks, Seed, Steps, bytes_table, check_sizes, figures, model


def _row(c: Comparison) -> dict[str, Any]:
    """Rank 0 of one run: what is on the device and on the host, and what crossed the link."""
    crossed = {d: c.distributed.traffic.at(0, "host", d).bytes_sent // len(c.batches) for d in ("to_host", "from_host")}
    ledger = c.distributed.ledgers[0]
    return {
        "offload": c.layout.offload,
        "device peak (bytes)": ledger.peak,
        "host (bytes)": ledger.most["host"],
        "to host a step": crossed["to_host"],
        "from host a step": crossed["from_host"],
        "equals formula": "yes" if bytes_table(c)[1] else "NO",
        "relative error": c.difference.relative,
    }


def offload(
    ranks: Ranks = 2,
    zero: Annotated[int, "ZeRO stage of the small run: 0 to 3."] = 3,
    batch: Batch = 4,
    length: Length = 16,
    steps: Steps = 3,
    params_billions: Annotated[float, "Parameters of the real model whose transfers are priced."] = 7.0,
    hidden: Annotated[int, "Its width."] = 4096,
    layers: Annotated[int, "Its blocks."] = 32,
    gpus: Annotated[int, "Data-parallel GPUs that share its state."] = 8,
    tokens: Annotated[int, "Tokens of a GPU and step."] = 8192,
    tflops: Annotated[float, "Sustained TFLOP/s of a GPU."] = 400.0,
    link: Annotated[float, "GB/s (1e9) of a GPU's host link, one way."] = 25.0,
    seed: Seed = 0,
) -> Report:
    """Optimizer, weights or activations in host memory: every byte over the link counted on a small run.

    Then the bandwidth at which each transfer hides, for a model of real size.
    """
    check_sizes(ranks, batch, length, steps)
    config = model("dense")
    base: dict[str, Any] = {"dp_shard": ranks, "zero": zero} if zero else {"dp_replicate": ranks}
    runs = [
        compare(config, Layout(**base, offload=what), batch=batch, length=length, steps=steps, seed=seed)
        for what in ("none", "optimizer", "parameters", "activations")
    ]
    rows = [_row(c) for c in runs]
    equal = all(bytes_table(c)[1] for c in runs)
    if not 1e-3 <= link <= 1e6:
        raise SpecError(f"a host link of {link} GB/s", "link", "25, 55")
    priced = [
        {
            "offload": t.what,
            "moves": t.moves,
            "beside": t.beside,
            "GB a GPU and step": t.size_bytes / 1e9,
            "hides at GB/s": t.hides_at_bytes_per_s / 1e9,
            f"visible at {link:g} GB/s (s)": t.exposed_s(link * 1e9),
        }
        for t in transfers(params_billions * 1e9, gpus, tokens, tflops * 1e12, hidden=hidden, layers=layers)
    ]
    return Report(
        f"Offload on {ranks} ranks, and for {params_billions:g}B on {gpus} GPUs",
        [
            Table("The small run, rank 0", rows),
            Table(f"{params_billions:g}B, {tokens:,} tokens a GPU and step at {tflops:g} TFLOP/s", priced),
        ],
        {**figures(runs[-1], equal), "small": rows, "transfers": priced},
        [
            "Weights hide at F / (n T) bytes/s, gradients at half of that, whatever the model's size: more tokens a step hide more.",
            "Activations: one saved input a block (2 bytes x hidden a token) hides at 2 hidden x F / (2 N / layers), at any batch.",
            "All that a block saves (34 bytes x hidden with flash attention) needs 17 times that.",
        ],
    )


STUDY = Study("offload", offload, "trainwright simulate offload --params-billions 70 --gpus 4 --hidden 8192 --layers 80", ("zero-offload",))
