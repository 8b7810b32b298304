"""Any combination: data, sharded data, tensor, sequence, pipeline, context and expert parallelism at once."""

from __future__ import annotations

from typing import Annotated

from ..check import Comparison, compare
from ..fsdp import Optimizer
from ..layout import Layout
from ..pipeline import plan
from ..report import Report, Table
from ..traffic import states_bytes
from . import Study
from .common import (
    Batch,
    Layers,
    Length,
    Micro,
    Model,
    ScheduleName,
    Seed,
    Steps,
    against_one_device,
    bytes_table,
    check_sizes,
    figures,
    model,
)


def _holdings(c: Comparison) -> Table:
    """Every rank's place in the mesh, what it holds at the end of backward, and its peak."""
    layout = c.layout
    words = {0: "embedding", c.config.head_unit: "head"}
    stages = plan(c.config, layout)
    holds = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        state = states_bytes(c.config, layout, rank, Optimizer())
        holds.append(
            {
                "rank": rank,
                "pp": at.pp,
                "dp": at.replicate * layout.dp_shard + at.shard,
                "cp": at.cp,
                "tp": at.tp,
                "units": ", ".join(words.get(u, str(u)) for u in sorted(stages.units_of(at.pp))),
                "weights": state["parameters"],
                "gradients": state["gradients"],
                "Adam": state["optimizer"],
                "peak (bytes)": c.distributed.ledgers[rank].peak,
            }
        )
    return Table("What each rank holds (bytes)", holds)


def combined(
    dp_replicate: Annotated[int, "Replicas."] = 1,
    dp_shard: Annotated[int, "Ranks that share one replica's state (with --zero 1 to 3)."] = 2,
    zero: Annotated[int, "ZeRO stage over dp_shard x cp."] = 3,
    tp: Annotated[int, "Tensor parallel."] = 2,
    sequence_parallel: Annotated[bool, "Split tokens where tensor parallelism leaves them whole."] = True,
    pp: Annotated[int, "Pipeline ranks."] = 2,
    cp: Annotated[int, "Context parallel."] = 2,
    ep: Annotated[int, "Expert parallel, out of dp x cp (with --model moe)."] = 1,
    microbatches: Micro = 2,
    schedule: ScheduleName = "1f1b",
    virtual_stages: Annotated[int, "Model chunks of a pipeline rank; 0: the schedule's default."] = 0,
    recompute: Annotated[str, "none, selective or full."] = "none",
    capacity_factor: Annotated[float, "Capacity of an expert (with --model moe); 0: dropless."] = 0.0,
    layers: Layers = 4,
    batch: Batch = 9,
    length: Length = 13,
    steps: Steps = 5,
    padded: Annotated[bool, "End each sequence in padding at a place of its own."] = False,
    model_name: Model = "dense",
    seed: Seed = 0,
) -> Report:
    """Up to four dimensions (and experts) at once, with sizes that need not divide: trained for several steps and compared with one device."""
    changes = {"capacity_factor": capacity_factor or None} if model_name == "moe" else {}
    config = model(model_name, layers=layers, **changes)
    layout = Layout(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        zero=zero,
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        pp=pp,
        cp=cp,
        ep=ep,
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        recompute=recompute,
    )
    layout.check(config, batch, length)
    check_sizes(layout.world_size, batch, length, steps)
    c = compare(config, layout, batch=batch, length=length, steps=steps, seed=seed, padded=padded)
    table, equal = bytes_table(c)
    return Report(
        f"{layout.world_size} ranks: dp {layout.data_parallel} (ZeRO-{zero}) x pp {pp} x cp {cp} x tp {tp}"
        + (f", ep {ep}" if ep > 1 else ""),
        [_holdings(c), against_one_device(c), table],
        figures(c, equal),
        [f"{config.parameter_count:,} parameters, {batch} sequences of {length} tokens, {steps} steps."],
    )


STUDY = Study("combined", combined, "trainwright simulate combined --dp-shard 2 --tp 2 --pp 2 --cp 2", ("4d", "3d"))
