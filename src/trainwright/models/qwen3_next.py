"""Qwen3-Next: three gated delta-rule layers to one of gated attention, many small experts and a shared one (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec.blocks import Op, Weight
from ..spec.model import ModelSpec
from . import Family
from .keys import MOST_HEADS, Keys
from .layers import by_kind, ends, label, make, pre_norm, rope_buffers
from .parts import Part, activation, attention, divisors_near, gated_mlp, linear, multiply, norm, norms, read_heads
from .qwen2_moe import qwen_experts, sparse_layers

DEFAULTS = {
    "vocab_size": 151936, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512,
}  # fmt: skip
LAYER_TYPES = ("full_attention", "linear_attention")


def delta_net(keys: Keys, hidden: int, prefix: str = "linear_attn.") -> Part:
    """Gated delta rule: projections, a short causal convolution over q, k, v, recurrence, gated norm of each head, output."""
    k_heads, v_heads = keys.whole("linear_num_key_heads", most=MOST_HEADS), keys.whole("linear_num_value_heads", most=MOST_HEADS)
    k_dim, v_dim = keys.whole("linear_key_head_dim", most=2**16), keys.whole("linear_value_head_dim", most=2**16)
    kernel = keys.whole("linear_conv_kernel_dim", most=1024)
    if v_heads % k_heads:
        found = f"{v_heads} value heads do not divide over {k_heads} key heads"
        raise SpecError(found, keys.where("linear_num_key_heads"), divisors_near(v_heads, k_heads))
    key, value = k_heads * k_dim, v_heads * v_dim
    conv = 2 * key + value
    state = (Weight(f"{prefix}dt_bias", (v_heads,), 0), Weight(f"{prefix}A_log", (v_heads,), 0))

    def rows(source: str, output: str) -> list[Op]:
        return [
            linear("in_proj_qkvz", source, "qkvz", hidden, conv + value, prefix=prefix),
            linear("in_proj_ba", source, "ba", hidden, 2 * v_heads, prefix=prefix),
            # PyTorch keeps the depthwise kernel as (channels, 1, width).
            Op("conv1d", "conv1d", ("qkvz",), "conv", conv, "tensor", (Weight(f"{prefix}conv1d.weight", (conv, kernel), 0),), k=kernel),
            activation("conv_act", "conv", "qkv", conv, "silu"),
            Op(
                "linear_attention",
                "delta_rule",
                ("qkv", "ba"),
                "attn",
                value,
                "tensor",
                state,
                heads=v_heads,
                kv_heads=k_heads,
                head_dim=k_dim,
                v_head_dim=v_dim,
            ),
            norm("gated_norm", "attn", "attn_n", v_dim, heads=v_heads, path=f"{prefix}norm"),
            activation("gate", "qkvz", "z", value, "silu"),
            multiply("gate_mul", "attn_n", "z", "gated", value),
            linear("out_proj", "gated", output, value, hidden, parallel="row", prefix=prefix),
        ]

    return rows


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    keys = Keys(config, name, DEFAULTS)
    hidden, layers = keys.hidden(), keys.layers()
    shape, bias = read_heads(keys, hidden), keys.flag("attention_bias")
    every = keys.whole("full_attention_interval", default=4)
    types = keys.kinds("layer_types", layers, LAYER_TYPES) or [LAYER_TYPES[(i + 1) % every != 0] for i in range(layers)]
    function, sparse = keys.function("hidden_act", default="silu"), sparse_layers(keys, layers)
    full = attention(shape, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)
    mixers = {"full_attention": full, "linear_attention": delta_net(keys, hidden)}
    dense, moe = gated_mlp(hidden, keys.ffn(), function), qwen_experts(keys, hidden, function, shared=True)

    def block(kind: tuple[str, bool]) -> Any:
        words = ("linear" if kind[0] == "linear_attention" else "full", "moe" if kind[1] else "dense")
        return pre_norm(label(*words), hidden, norms(hidden), mixers[kind[0]], moe if kind[1] else dense, tags=words)

    blocks = by_kind(layers, lambda i: (types[i], sparse[i]), block)
    return make(keys, "qwen3_next", blocks, buffer_bytes=rope_buffers(shape.head_dim // 4), **ends(keys, hidden))


FAMILY = Family("qwen3_next", ("qwen3_next",), build)
