"""Models, machines and plans for the tests of the ledger."""

from __future__ import annotations

from typing import Any

from trainwright.cost.ledger import memory_rows
from trainwright.cost.memory import memory
from trainwright.cost.memory_table import MemoryTable
from trainwright.cost.table import PlanTable
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan, Structure

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 12, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 102400, "tie_word_embeddings": False,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "seq_length": 2048, "vocab_size": 250880, "tie_word_embeddings": True}
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = QWEN_7B | {"model_type": "llama", "vocab_size": 32000}
SMALL = LLAMA_70B | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 14,
    "vocab_size": 32000,
}
SMALL_MOE = DEEPSEEK_V2 | {
    "hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 16, "num_hidden_layers": 6,
}  # fmt: skip
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def gpu(name: str, arch: str, units: int, mib: int) -> GpuSpec:
    return GpuSpec(
        name, (), "NVIDIA", "SXM", arch, units, {"bf16": 1e15}, mib / 1024, mib * 2**20, "HBM", 2e12, "NVLink", 3e11, 8, 8, 200, 3e10, 400
    )


A100, H100 = gpu("A100-SXM-80GB", "8.0", 108, 81920), gpu("H100-SXM-80GB", "9.0", 132, 81559)
B200, RTX_3090 = gpu("B200-SXM-180GB", "10.0", 148, 183359), gpu("RTX-3090-24GB", "8.6", 82, 24576)


def cluster(device: GpuSpec, gpus: int = 8) -> ClusterSpec:
    return ClusterSpec(device, max(1, gpus // 8), min(gpus, 8), 8, 25e9)


MEGATRON = {"framework": "megatron", "sharding": "zero1"}
NUMBERS = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "virtual_stages", "micro_batch_size", "accumulation")


def plan(**given: Any) -> ParallelPlan:
    numbers = {k: given.pop(k) for k in NUMBERS if k in given}
    return ParallelPlan(Structure(**given), **numbers)


def job(seq_len: int = 4096, **more: Any) -> TrainingJob:
    return TrainingJob(seq_len, 8, **more)


def peaks(config: dict, device: GpuSpec, work: TrainingJob, layout: ParallelPlan) -> MemoryTable:
    return memory(build_model(config, "m"), cluster(device, layout.gpus), work, PlanTable.from_plans([layout]))


def ledger(config: dict, work: TrainingJob, *layouts: ParallelPlan) -> MemoryTable:
    table = PlanTable.from_plans(layouts)
    return memory_rows(build_model(config, "m"), cluster(A100), work, layouts[0].structure, table)
