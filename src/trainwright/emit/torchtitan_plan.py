"""What every release of torchtitan is told alike: names of models and schedules, sections and keys, layers of stages."""

from __future__ import annotations

from typing import Any

from ..cost.stages import layers_per_stage
from ..errors import SpecError
from ..resolve import Run
from .base import Options
from .common import steps

# catalogue id -> (module, flavor) of torchtitan/models
FLAVORS: dict[str, tuple[str, str]] = {
    "llama-3.2-1b": ("llama3", "1B"), "llama-3.2-3b": ("llama3", "3B"), "llama-3.1-8b": ("llama3", "8B"), "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"), "llama-3-70b": ("llama3", "70B"), "llama-3.3-70b": ("llama3", "70B"), "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"), "qwen3-1.7b": ("qwen3", "1.7B"), "qwen3-4b": ("qwen3", "4B"), "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"), "qwen3-30b-a3b": ("qwen3", "30B-A3B"), "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "gpt-oss-20b": ("gpt_oss", "20b"), "gpt-oss-120b": ("gpt_oss", "120b"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"), "deepseek-v2": ("deepseek_v3", "236B"), "deepseek-v3": ("deepseek_v3", "671B"),
}  # fmt: skip
BILLIONS = {"llama-3.2-1b": 1.2, "llama-3.2-3b": 3.2, "llama-3.1-8b": 8.0, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9}
PRESETS = {"llama3": "llama3_8b", "qwen3": "qwen3_0_6b", "gpt_oss": "gpt_oss_20b", "deepseek_v3": "deepseek_v3_16b"}
# what those presets read from assets/hf
TOKENIZERS = {
    "llama3": "Llama-3.1-8B", "qwen3": "Qwen3-0.6B", "gpt_oss": "gpt-oss-20b", "deepseek_v3": "deepseek-moe-16b-base",
}  # fmt: skip
SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "looped-bfs": "LoopedBFS", "interleaved-zb1p": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
CONVERTERS = {"rowwise": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree", "dp_shard": "data_parallel_shard_degree", "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree", "ep": "expert_parallel_degree",
}  # fmt: skip


def is_old(options: Options) -> bool:
    """Releases before 0.3 read TOML."""
    parts = options.torchtitan_version.split(".")
    if not all(p.isdigit() for p in parts[:2]) or len(parts) < 2:
        raise SpecError(f"{options.torchtitan_version[:40]!r} is not a release such as 0.3.0", "--torchtitan-version", ["0.3.0", "0.2.0"])
    return (int(parts[0]), int(parts[1])) < (0, 3)


def sections(run: Run) -> dict[str, dict[str, Any]]:
    """Section -> key -> value, the names that 0.2 and 0.3 share."""
    p, s, job = run.plan, run.plan.structure, run.job
    whole = "always" if s.reshard_root else "default"
    training: dict[str, Any] = {
        "local_batch_size": p.micro_batch_size * (p.accumulation if p.pp > 1 else 1),
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "steps": steps(run),
        "dtype": "bfloat16" if job.master_weights == "none" and job.precision != "fp32" else "float32",
        "mixed_precision_param": "float32" if job.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": s.offload == "params-cpu",
    }
    parallelism: dict[str, Any] = {key: getattr(p, axis) for axis, key in DEGREES.items()}
    parallelism["fsdp_reshard_after_forward"] = {"zero3": whole, "zero2": "never", "none": "default"}[s.sharding]
    if p.pp > 1:
        parallelism |= {"pipeline_parallel_schedule": SCHEDULES[s.schedule], "pipeline_parallel_microbatch_size": p.micro_batch_size}
    return {
        "training": training,
        "parallelism": parallelism,
        "compile": {"enable": s.compile} | ({"enable_async_tensor_parallel": True} if s.async_tp else {}),
        "optimizer": {"implementation": job.optimizer_kernel},
    }


def stage_layers(run: Run) -> list[range] | None:
    """The layers of each stage, in the order of the model; None without a pipeline."""
    p = run.plan
    if p.pp == 1:
        return None
    counts = layers_per_stage(run.model.num_layers, p.pp * p.virtual_stages, p.structure.layers_per_stage)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(first, first + count) for first, count in zip(starts, counts, strict=True)]
