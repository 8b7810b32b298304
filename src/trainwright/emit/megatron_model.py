"""A model's config.json as Megatron-LM's architecture arguments, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from .launch import Flags

# Families whose layers Megatron-LM's GPT model can build from flags alone.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2")
FAMILIES = (*LIKE_LLAMA, "gpt2")
QKV_BIAS = ("qwen2",)
QK_NORM = ("qwen3", "qwen3_moe")
MLA = ("deepseek_v3", "kimi_k2")


def architecture(run: Run) -> Flags:
    """Every flag of the model; sizes from config.json, the vocabulary through a tokenizer that needs no file."""
    c, model = run.model.config, run.model
    flags: Flags = [
        ("--num-layers", model.num_layers),
        ("--hidden-size", model.hidden),
        ("--ffn-hidden-size", _width(run)),
        ("--num-attention-heads", model.heads),
        ("--seq-length", run.job.seq_len),
        ("--max-position-embeddings", max(run.job.seq_len, model.max_positions)),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", model.vocab),
    ]
    if model.model_type == "gpt2":
        return [*flags, ("--position-embedding-type", "learned_absolute")]
    flags += [("--position-embedding-type", "rope"), ("--normalization", "RMSNorm"), ("--swiglu", True), ("--disable-bias-linear", True)]
    flags += _rotary(c)
    if not model.tied:
        flags.append(("--untie-embeddings-and-output-weights", True))
    if model.model_type in MLA:
        flags += _latent(c)
    else:
        flags.append(("--kv-channels", model.head_dim))
        if model.kv_heads != model.heads:
            flags += [("--group-query-attention", True), ("--num-query-groups", model.kv_heads)]
    if model.model_type in QKV_BIAS:
        flags.append(("--add-qkv-bias", True))
    if model.model_type in QK_NORM:
        flags.append(("--qk-layernorm", True))
    return flags + (_experts(run) if model.is_moe else [])


def _width(run: Run) -> int:
    c, model = run.model.config, run.model
    if model.model_type == "gpt2":
        return int(c.get("n_inner") or 4 * model.hidden)
    return int(c.get("intermediate_size") or c["moe_intermediate_size"])


def rope(c: Any) -> Mapping[str, Any]:
    """The rotary part of a config.json, in either of its spellings: transformers 5 keeps base and scaling in ``rope_parameters``."""
    tables = [t for t in (c.get("rope_scaling"), c.get("rope_parameters")) if isinstance(t, Mapping)]
    found = {k: v for t in tables for k, v in t.items()}
    return found | ({"rope_theta": c["rope_theta"]} if c.get("rope_theta") else {})


def _rotary(c: Any) -> Flags:
    """Base, and Llama 3.1's scaling ; Megatron has no flag for other kinds."""
    found = rope(c)
    flags: Flags = [("--rotary-base", int(found["rope_theta"]))] if found.get("rope_theta") else []
    if found.get("rope_type", found.get("type")) == "llama3":
        flags += [("--use-rope-scaling", True), ("--rope-scaling-factor", float(found.get("factor", 8.0)))]
    return flags


def _latent(c: Any) -> Flags:
    flags: Flags = [
        ("--multi-latent-attention", True),
        ("--kv-lora-rank", c["kv_lora_rank"]),
        ("--qk-head-dim", c["qk_nope_head_dim"]),
        ("--qk-pos-emb-head-dim", c["qk_rope_head_dim"]),
        ("--v-head-dim", c["v_head_dim"]),
        ("--qk-layernorm", True),
    ]
    return flags + ([("--q-lora-rank", c["q_lora_rank"])] if c.get("q_lora_rank") else [])


def _experts(run: Run) -> Flags:
    c, model = run.model.config, run.model
    width = int(c.get("moe_intermediate_size") or c["intermediate_size"])
    flags: Flags = [
        ("--num-experts", model.experts),
        ("--moe-router-topk", model.top_k),
        ("--moe-ffn-hidden-size", width),
        ("--moe-grouped-gemm", True),
        ("--moe-token-dispatcher-type", "alltoall"),
        ("--moe-router-load-balancing-type", "aux_loss"),
        ("--moe-aux-loss-coeff", 0.001),
    ]
    dense = int(c.get("first_k_dense_replace") or 0)
    if dense:
        flags.append(("--moe-layer-freq", f"([0]*{dense}+[1]*{model.num_layers - dense})"))
    if c.get("n_shared_experts"):
        flags.append(("--moe-shared-expert-intermediate-size", int(c["n_shared_experts"]) * width))
    if run.job.moe_capacity_factor is not None:
        flags += [("--moe-expert-capacity-factor", run.job.moe_capacity_factor), ("--moe-pad-expert-input-to-capacity", True)]
    return flags
