"""Models, cards and tables that the tests of time share; numbers of the cards from their datasheets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainwright.cost.step import TimeTable, exact, screen
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.model import ModelSpec
from trainwright.spec.plan import ParallelPlan, Structure

H100 = GpuSpec(
    id="H100-SXM-80GB",
    aliases=("h100",),
    vendor="NVIDIA",
    form="SXM5",
    arch="9.0",
    compute_units=132,
    peak_flops={"fp32": 67e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12, "fp8": 1978.9e12},
    memory_label_gb=80,
    capacity_bytes=81559 * 2**20,
    memory_type="HBM3",
    hbm_bytes_per_s=3.35e12,
    link="NVLink4+NVSwitch3",
    link_bytes_per_s=450e9,
    scaleup_gpus=8,
    gpus_per_node=8,
    nic_default_gbps=400,
    pcie_bytes_per_s=63e9,
    tdp_w=700,
)
A100 = replace(
    H100,
    id="A100-SXM-80GB",
    aliases=("a100",),
    arch="8.0",
    compute_units=108,
    peak_flops={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    hbm_bytes_per_s=2.039e12,
    link="NVLink3+NVSwitch2",
    link_bytes_per_s=300e9,
    nic_default_gbps=200,
    pcie_bytes_per_s=31.5e9,
    tdp_w=400,
)


def cluster(nodes: int = 1, gpu: GpuSpec = H100, gbps: float | None = None) -> ClusterSpec:
    return ClusterSpec(gpu, nodes, 8, 8, (gbps or gpu.nic_default_gbps) * 1e9 / 8)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> ModelSpec:
    keys = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_positions": positions}
    return build_model({"model_type": "gpt2", **keys}, "gpt")


def llama(layers: int = 32, hidden: int = 4096, ffn: int = 14336, heads: int = 32, kv_heads: int = 8, vocab: int = 128256) -> ModelSpec:
    keys = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 131072}
    return build_model({"model_type": "llama", **keys, **more}, "llama")


def job(seq_len: int = 2048, batch: int = 64, **more: Any) -> TrainingJob:
    return TrainingJob(seq_len=seq_len, global_batch_size=batch, **more)


def plan(batch: int = 64, *, micro: int = 1, structure: Structure | None = None, **degrees: int) -> ParallelPlan:
    """Accumulation follows from the batch; `degrees` are dp_shard, dp_replicate, tp, pp, ..."""
    made = ParallelPlan(structure or Structure(framework="megatron", sharding="zero1"), micro_batch_size=micro, **degrees)
    return replace(made, accumulation=batch // (made.dp * micro))


def timed(model: ModelSpec, on: ClusterSpec, what: TrainingJob, *plans: ParallelPlan, quick: bool = False) -> TimeTable:
    table = PlanTable.from_plans(plans)
    return (screen if quick else exact)(model, on, what, table, traffic(model, on, what, table))
