"""Small models, clusters and a stand-in for the equations that the tests of the search share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.table import Column, PlanTable
from trainwright.models import build_model
from trainwright.search.pricing import Equations, Least, Need
from trainwright.search.rules import Case
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.model import ModelSpec
from trainwright.spec.plan import Structure
from trainwright.spec.run import StrategySection

H100 = GpuSpec(
    id="H100-SXM-80GB",
    aliases=(),
    vendor="NVIDIA",
    form="SXM5",
    arch="9.0",
    compute_units=132,
    peak_flops={"fp32": 67e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1979e12},
    memory_label_gb=80,
    capacity_bytes=81559 * 2**20,
    memory_type="HBM3",
    hbm_bytes_per_s=3.35e12,
    link="NVLink4",
    link_bytes_per_s=450e9,
    scaleup_gpus=8,
    gpus_per_node=8,
    nic_default_gbps=400,
    pcie_bytes_per_s=63e9,
    tdp_w=700,
)
V100 = replace(H100, id="V100-SXM2-32GB", arch="7.0", peak_flops={"fp32": 15.7e12, "fp16": 125e12}, capacity_bytes=32768 * 2**20)

TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def cluster(gpus: int, gpu: GpuSpec = H100, **more: object) -> ClusterSpec:
    node = next(n for n in range(min(8, gpus), 0, -1) if gpus % n == 0)
    return ClusterSpec(gpu, gpus // node, node, 8, 50e9, **{"usd_per_gpu_hour": 3.0, "price_source": "test", **more})  # type: ignore[arg-type]


def case(config: Mapping[str, object] = TINY, gpus: int = 8, batch: int = 16, seq: int = 512, gpu: GpuSpec = H100, **more: object) -> Case:
    model: ModelSpec = build_model(config, "test")
    return Case(model, cluster(gpus, gpu), TrainingJob(seq, batch, **{"tokens": 1e9, **more}))  # type: ignore[arg-type]


def strategy(**fields: object) -> StrategySection:
    return StrategySection.model_validate(fields)


@dataclass(frozen=True)
class FakeBounds:
    """Four fifths of what is needed."""

    pricing: Equations
    table: PlanTable

    def least(self, structures: tuple[Structure, ...], rows: NDArray[np.intp]) -> Column:
        return 0.8 * self.pricing.need(replace(self.table.take(rows), structures=structures)).device


@dataclass(frozen=True)
class Fake(Equations):
    """Round numbers with the right directions: more shards, recomputation and offload need less memory; the last two cost time; `screen` <= `exact`.

    `state` is bytes of all weights and states, `saved` bytes of one sequence's activations.
    """

    state = 16e9 * 8
    saved = 4e9

    def need(self, table: PlanTable, limit: int | None = None) -> Need:
        s = table.structures
        kept = np.array([{"none": 1.0, "selective": 0.6, "full": 0.1}[x.recompute] for x in s])[table.structure]
        moved = np.array(
            [{"none": 0.0, "optimizer-cpu": 0.5, "optimizer-nvme": 0.5, "activations-cpu": 0.0}.get(x.offload, 0.9) for x in s]
        )[table.structure]
        stage = np.array([{"none": 0.0, "zero1": 0.6, "zero2": 0.8, "zero3": 1.0}[x.sharding] for x in s])[table.structure]
        states = self.state / (table.tp * table.pp) * (stage / table.dp_shard + 1 - stage) * (1 - moved)
        split = np.where([x.sequence_parallel for x in s], 1.0, 1.5)[table.structure]
        activations = self.saved * table.micro_batch_size * kept * np.where(table.tp > 1, split, 1) / (table.tp * table.cp)
        host = np.where(moved > 0, self.state / (table.tp * table.pp) * 8, 0)
        return Need((states + activations + 1e9).astype(np.int64), host.astype(np.int64), np.zeros(len(table), np.int64))

    def bounds(self, table: PlanTable) -> Least:
        return FakeBounds(self, table)

    def outline(self, table: PlanTable) -> Mapping[str, Column]:
        return {"step": np.zeros(len(table))}

    def outlined(self, outline: Mapping[str, Column], table: PlanTable) -> Column:
        return 0.9 * self.screen(table)

    def at_least(self, parts: Mapping[str, Column], table: PlanTable) -> Column:
        return self.screen(table)

    def screen(self, table: PlanTable) -> Column:
        s = table.structures
        again = np.array([{"none": 0.0, "selective": 0.05, "full": 0.33}[x.recompute] for x in s])[table.structure]
        moved = np.array([0.0 if x.offload == "none" else 0.4 for x in s])[table.structure]
        plain = np.where([x.sequence_parallel for x in s], 1.0, 0.995)[table.structure]
        bubble = (table.pp - 1) / (table.virtual_stages * table.accumulation)
        return (
            plain
            * 10.0
            * self.job.global_batch_size
            / table.gpus
            * (1 + again + 0.02 * np.log2(table.tp) + 0.01 * np.log2(table.cp))
            * (1 + bubble)
            + moved
        )

    def exact(self, table: PlanTable) -> tuple[Column, Mapping[str, Column]]:
        screened = self.screen(table)
        late = 0.01 * screened * ((table.tp * 7 + table.pp * 3 + table.micro_batch_size) % 5) / 5
        return screened + late, {"compute": screened, "other": late}
