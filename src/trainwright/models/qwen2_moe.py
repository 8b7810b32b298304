"""Qwen1.5-MoE and Qwen2-57B-A14B: biases on q, k, v, routed experts beside one gated shared expert (arXiv:2407.10671, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.model import ModelSpec
from . import Family
from .keys import Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import Heads, Part, attention, experts, gated_mlp, norms, read_experts, read_heads
from .qwen2 import qwen_windows

DEFAULTS = {
    "vocab_size": 151936, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
}  # fmt: skip


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    shape = read_heads(keys, keys.hidden())
    return qwen_moe(keys, "qwen2_moe", shape, {"qkv_bias": keys.flag("qkv_bias", True)}, shared=True)


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts: every ``decoder_sparse_step``-th that ``mlp_only_layers`` does not name."""
    step = keys.whole("decoder_sparse_step", default=1)
    dense = set(keys.wholes("mlp_only_layers") or ())
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def qwen_experts(keys: Keys, hidden: int, function: str, *, shared: bool) -> Part:
    """The expert part of the Qwen MoE models, with the gated shared expert where the family has one."""
    count, top_k = read_experts(keys, "num_experts", "num_local_experts")
    width = keys.whole("shared_expert_intermediate_size", default=0, least=0, most=2**24) if shared else 0
    extra = gated_mlp(hidden, width, function, prefix="mlp.shared_expert.") if width else None
    return experts(hidden, keys.ffn("moe_intermediate_size"), count, top_k, function=function, shared=extra, shared_gate=extra is not None)


def qwen_moe(keys: Keys, family: str, shape: Heads, options: Mapping[str, Any], *, shared: bool) -> ModelSpec:
    """The sparse decoder of Qwen2-MoE and Qwen3-MoE; `options` are those of `attention`."""
    hidden, layers = keys.hidden(), keys.layers()
    function = keys.function("hidden_act", default="silu")
    sparse, windows = sparse_layers(keys, layers), qwen_windows(keys, layers)
    dense = gated_mlp(hidden, keys.ffn(), function)
    moe = qwen_experts(keys, hidden, function, shared=shared)

    def block(kind: tuple[bool, int | None]) -> Any:
        is_moe, window = kind
        words = ("sliding" if window else "", "moe" if is_moe else "dense")
        part = attention(shape, window=window, **options)
        return pre_norm(label(*words), hidden, norms(hidden), part, moe if is_moe else dense, tags={w for w in words if w})

    blocks = by_kind(layers, lambda i: (sparse[i], windows[i]), block)
    return make(keys, family, blocks, buffer_bytes=rope_buffers(shape.head_dim), **ends(keys, hidden))


FAMILY = Family("qwen2_moe", ("qwen2_moe",), build)
