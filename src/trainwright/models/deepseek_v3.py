"""DeepSeek-V3 and R1: latent attention, dense first layers, then routed and shared experts, multi-token prediction (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec.blocks import Block, Op, Weight
from ..spec.model import ModelSpec
from . import Family
from .keys import MOST_HEADS, MOST_LAYERS, Keys
from .layers import by_kind, ends, label, logits, make, pre_norm, rope_buffers
from .parts import Part, experts, gated_mlp, linear, norm, norms, read_experts

DEFAULTS = {
    "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3,
}  # fmt: skip


def latent_attention(keys: Keys, hidden: int, prefix: str = "self_attn.") -> Part:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): q from a latent of ``q_lora_rank`` (null: from the input), keys and values
    from one of ``kv_lora_rank``, and a rotary part of the key shared by all heads.

    The rows ``kv_b_proj`` -> ``kv`` hold key and value of every head; ``rope`` puts q and k together, whole, as ``q_r`` and ``k_r``.
    """
    heads = keys.whole("num_attention_heads", most=MOST_HEADS)
    kv_heads = keys.whole("num_key_value_heads", default=heads, most=MOST_HEADS)
    if kv_heads != heads:
        raise SpecError(
            f"latent attention has as many key-value heads as heads, not {kv_heads}", keys.where("num_key_value_heads"), [heads]
        )
    nope, rot, v_dim = (keys.whole(f"{p}_head_dim", most=2**16) for p in ("qk_nope", "qk_rope", "v"))
    q_rank, kv_rank = keys.whole("q_lora_rank", default=None, most=2**20), keys.whole("kv_lora_rank", most=2**20)
    bias, dim = keys.flag("attention_bias"), nope + rot

    def latent(name: str, source: str, output: str, width: int, extra: int = 0) -> list[Op]:
        return [
            linear(name, source, output, hidden, width + extra, bias=bias, parallel="replicated", prefix=prefix),
            norm(f"{output}_layernorm", output, f"{output}_n", width, path=f"{prefix}{output}_layernorm"),
        ]

    def rows(source: str, output: str) -> list[Op]:
        if q_rank is None:
            ops = [linear("q_proj", source, "q", hidden, heads * dim, prefix=prefix)]
        else:
            ops = [*latent("q_a_proj", source, "q_a", q_rank), linear("q_b_proj", "q_a_n", "q", q_rank, heads * dim, prefix=prefix)]
        return [
            *ops,
            *latent("kv_a_proj_with_mqa", source, "kv_a", kv_rank, rot),
            linear("kv_b_proj", "kv_a_n", "kv", kv_rank, heads * (nope + v_dim), prefix=prefix),
            Op("rope", "rope", ("q", "kv"), "q_r", 2 * heads * dim, "tensor", heads=heads, kv_heads=heads, head_dim=dim),
            Op(
                "attention",
                "core_attn",
                ("q_r", "k_r", "kv"),
                "attn",
                heads * v_dim,
                "tensor",
                heads=heads,
                kv_heads=heads,
                head_dim=dim,
                v_head_dim=v_dim,
            ),
            linear("o_proj", "attn", output, heads * v_dim, hidden, bias=bias, parallel="row", prefix=prefix),
        ]

    return rows


def dense_then_moe(keys: Keys, hidden: int, attention: Part) -> tuple[list[Block], int]:
    """``first_k_dense_replace`` dense layers, then experts in every ``moe_layer_freq``-th; and the elements of the routers' bias buffers."""
    layers, function = keys.layers(), keys.function("hidden_act", default="silu")
    first = keys.whole("first_k_dense_replace", default=0, least=0, most=MOST_LAYERS)
    every = keys.whole("moe_layer_freq", default=1, most=MOST_LAYERS)
    ffn, width = keys.ffn(), keys.ffn("moe_intermediate_size")
    count, top_k = read_experts(keys, "n_routed_experts", "num_local_experts")
    shared = keys.whole("n_shared_experts", default=0, least=0, most=1024)
    extra = gated_mlp(hidden, width * shared, function, prefix="mlp.shared_experts.") if shared else None
    dense = gated_mlp(hidden, ffn, function)
    moe = experts(hidden, width, count, top_k, function=function, shared=extra)

    def block(is_moe: bool) -> Block:
        word = "moe" if is_moe else "dense"
        return pre_norm(label(word), hidden, norms(hidden), attention, moe if is_moe else dense, tags={word})

    sparse = [i >= first and i % every == 0 for i in range(layers)]
    return by_kind(layers, lambda i: sparse[i], block), sum(sparse) * count


def multi_token_prediction(keys: Keys, hidden: int, vocab: int, layer: Block) -> tuple[Block, ...]:
    """``num_nextn_predict_layers`` modules (arXiv:2412.19437, section 2.2): two norms, a product 2h -> h, a layer, a norm and the logits.

    Embedding and output projection are the model's own; a checkpoint that stores copies of them counts 2 x vocab x hidden more.
    """
    depth = keys.whole("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0, most=64)
    inner, last = layer.ops, layer.ops[-1].output

    def module(index: int) -> Block:
        prefix = f"mtp.{index}."
        joined = Op(
            "linear",
            "eh_proj",
            ("e_n", "h_n"),
            "x",
            hidden,
            "sequence",
            (Weight(f"{prefix}eh_proj.weight", (hidden, 2 * hidden)),),
            k=2 * hidden,
        )
        rows = (
            Op("embedding", "embed_next", (), "e", hidden, "sequence"),
            norm("enorm", "e", "e_n", hidden, path=f"{prefix}enorm"),
            norm("hnorm", "x_in", "h_n", hidden, path=f"{prefix}hnorm"),
            joined,
            *inner,
            norm("shared_head_norm", last, "final", hidden, path=f"{prefix}shared_head.norm"),
            *logits("final", vocab, hidden, tied=True),
        )
        return Block(f"mtp_{index}", rows, layer.tags)

    return tuple(module(i) for i in range(depth))


def build(config: Mapping[str, Any], name: str) -> ModelSpec:
    return deepseek(Keys(config, name, DEFAULTS), "deepseek_v3", router_bias=True)


def deepseek(keys: Keys, family: str, *, router_bias: bool) -> ModelSpec:
    """The decoder of DeepSeek-V2, V3 and their relatives."""
    hidden = keys.hidden()
    blocks, routers = dense_then_moe(keys, hidden, latent_attention(keys, hidden))
    both = ends(keys, hidden)
    return make(
        keys,
        family,
        blocks,
        buffer_bytes=rope_buffers(keys.whole("qk_rope_head_dim")),
        router_bias_elements=routers if router_bias else 0,
        mtp=multi_token_prediction(keys, hidden, both["vocab"], blocks[-1]),
        **both,
    )


FAMILY = Family("deepseek_v3", ("deepseek_v3",), build)
