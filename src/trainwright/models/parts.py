"""What layers are made of: the rows of attention, MLP and experts.

A *part* is a function of the name of its input and of its output that returns rows in the order of execution, also the order in which
PyTorch registers the weights. `layers` joins parts to blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import SpecError
from ..spec.blocks import Op, Region, Weight
from .keys import MOST_EXPERTS, MOST_HEADS, Keys

Part = Callable[[str, str], list[Op]]
Norm = Callable[[str, str, str], Op]


@dataclass(frozen=True)
class Heads:
    """`heads` query heads that share `kv_heads` key-value heads, each of `head_dim`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def divisors_near(number: int, wanted: int, count: int = 3) -> list[int]:
    """The divisors of `number` nearest to `wanted`."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted(sorted({*small, *(number // d for d in small)}, key=lambda d: abs(d - wanted))[:count])


def read_heads(keys: Keys, hidden: int, heads_key: str = "num_attention_heads", *kv_keys: str) -> Heads:
    """Heads as a configuration gives them: ``head_dim`` apart or hidden / heads, key-value heads as many as heads where it does not say."""
    heads = keys.whole(heads_key, "num_attention_heads", most=MOST_HEADS)
    kv_keys = kv_keys or ("num_key_value_heads",)
    kv_heads = keys.whole(*kv_keys, default=heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise SpecError(
            f"{heads} heads do not divide over {kv_heads} key-value heads", keys.where(kv_keys[0]), divisors_near(heads, kv_heads)
        )
    head_dim = keys.whole("head_dim", default=None, most=2**16)
    if head_dim is None:
        if hidden % heads:
            raise SpecError(
                f"a hidden size of {hidden} does not divide over {heads} heads", keys.where(heads_key), divisors_near(hidden, heads)
            )
        head_dim = hidden // heads
    return Heads(hidden, heads, kv_heads, head_dim)


def linear(
    name: str,
    source: str,
    output: str,
    k: int,
    n: int,
    *,
    bias: bool = False,
    parallel: str = "column",
    prefix: str = "",
    region: Region | None = None,
) -> Op:
    """One product k -> n. `parallel`: column (outputs split), row (inputs split) or replicated."""
    tp_dim = {"column": 0, "row": 1, "replicated": None}[parallel]
    weights = [Weight(f"{prefix}{name}.weight", (n, k), tp_dim)]
    if bias:
        weights.append(Weight(f"{prefix}{name}.bias", (n,), 0 if parallel == "column" else None))
    return Op("linear", name, (source,), output, n, region or ("tensor" if parallel == "column" else "sequence"), tuple(weights), k=k)


def norm(
    name: str,
    source: str,
    output: str,
    width: int,
    kind: str = "rms",
    *,
    bias: bool = False,
    heads: int = 0,
    per_head: bool = False,
    path: str = "",
    region: Region = "sequence",
) -> Op:
    """A norm over `width` elements; with `heads` over each head's `width` elements (the output then has heads x width).

    `per_head`: each head has weights of its own (StableLM) instead of sharing one vector.
    """
    size = width * heads if per_head else width
    weights = [] if kind.endswith("no-weight") else [Weight(f"{path or name}.weight", (size,))]
    if bias and weights:
        weights.append(Weight(f"{path or name}.bias", (size,)))
    where: Region = "tensor" if heads else region
    out = width * max(heads, 1)
    return Op("norm", name, (source,), output, out, where, tuple(weights), function=kind, heads=heads, head_dim=width if heads else 0)


def norms(width: int, kind: str = "rms", *, bias: bool = False) -> Norm:
    """The norm that a model uses throughout: a function of (name, input, output)."""
    return lambda name, source, output: norm(name, source, output, width, kind, bias=bias)


def activation(name: str, source: str, output: str, width: int, function: str, region: Region = "tensor") -> Op:
    return Op("activation", name, (source,), output, width, region, function=function)


def multiply(name: str, a: str, b: str, output: str, width: int, region: Region = "tensor") -> Op:
    return Op("multiply", name, (a, b), output, width, region)


def add(name: str, a: str, b: str, output: str, width: int) -> Op:
    return Op("add", name, (a, b), output, width, "sequence")


def qk_norms(shape: Heads, kind: str, prefix: str, names: tuple[str, str], function: str = "rms", bias: bool = False) -> list[Op]:
    """Norms of q and k: "head" one vector for all heads (Qwen3), "each" one a head (StableLM), "all" over all heads together (OLMo 2)."""
    rows = []
    for name, source, heads in ((names[0], "q", shape.heads), (names[1], "k", shape.kv_heads)):
        path, out = f"{prefix}{name}", f"{source}_n"
        if kind == "all":
            rows.append(norm(name, source, out, heads * shape.head_dim, function, bias=bias, path=path, region="tensor"))
        else:
            rows.append(norm(name, source, out, shape.head_dim, function, bias=bias, heads=heads, per_head=kind == "each", path=path))
    return rows


def attention(
    shape: Heads,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    qk_norm_function: str = "rms",
    qk_norm_bias: bool = False,
    rope: bool = True,
    window: int | None = None,
    sinks: bool = False,
    gated: bool = False,
    prefix: str = "self_attn.",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> Part:
    """Multi-head, grouped-query (kv_heads < heads) or multi-query attention with its four projections.

    `qk_norm` as in `qk_norms`. `sinks`: one learned logit a head (gpt-oss). `gated`: the query projection also yields a gate of the same
    width whose sigmoid multiplies the output (Qwen3-Next).
    """
    q_name, k_name, v_name, o_name = names
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim

    def rows(source: str, output: str) -> list[Op]:
        ops = [
            linear(q_name, source, "q", shape.hidden, shape.q_width * (2 if gated else 1), bias=qkv_bias, prefix=prefix),
            linear(k_name, source, "k", shape.hidden, shape.kv_width, bias=qkv_bias, prefix=prefix),
            linear(v_name, source, "v", shape.hidden, shape.kv_width, bias=qkv_bias, prefix=prefix),
        ]
        q, k = "q", "k"
        if qk_norm:
            ops += qk_norms(shape, qk_norm, prefix, qk_norm_names, qk_norm_function, qk_norm_bias)
            q, k = "q_n", "k_n"
        if rope:
            width = shape.q_width + shape.kv_width
            ops.append(Op("rope", "rope", (q, k), "q_r", width, "tensor", heads=heads, kv_heads=kv_heads, head_dim=dim))
            q, k = "q_r", "k_r"
        sink = (Weight(f"{prefix}sinks", (heads,), 0),) if sinks else ()
        core = Op(
            "attention", "core_attn", (q, k, "v"), "attn", shape.q_width, "tensor", sink, heads=heads, kv_heads=kv_heads, window=window
        )
        ops.append(replace(core, head_dim=dim, v_head_dim=dim))
        out = "attn"
        if gated:
            ops += [
                activation("gate", "q", "attn_gate", shape.q_width, "sigmoid"),
                multiply("gate_mul", "attn", "attn_gate", "gated", shape.q_width),
            ]
            out = "gated"
        return [*ops, linear(o_name, out, output, shape.q_width, shape.hidden, bias=out_bias, parallel="row", prefix=prefix)]

    return rows


def gated_mlp(
    hidden: int,
    ffn: int,
    function: str = "silu",
    *,
    bias: bool = False,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Part:
    """down(act(gate x) * up x)."""
    gate, up, down = names

    def rows(source: str, output: str) -> list[Op]:
        return [
            linear(gate, source, f"{prefix}gate", hidden, ffn, bias=bias, prefix=prefix),
            linear(up, source, f"{prefix}up", hidden, ffn, bias=bias, prefix=prefix),
            activation("act", f"{prefix}gate", f"{prefix}act", ffn, function),
            multiply("mul", f"{prefix}act", f"{prefix}up", f"{prefix}product", ffn),
            linear(down, f"{prefix}product", output, ffn, hidden, bias=bias, parallel="row", prefix=prefix),
        ]

    return rows


def plain_mlp(
    hidden: int,
    ffn: int,
    function: str = "gelu",
    *,
    bias: bool = True,
    prefix: str = "mlp.",
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> Part:
    """down(act(up x)). The learned slopes of ``xielu`` are two scalars (arXiv:2411.13010)."""
    up, down = names
    slopes = (Weight(f"{prefix}act_fn.alpha_p", (1,)), Weight(f"{prefix}act_fn.alpha_n", (1,))) if function == "xielu" else ()

    def rows(source: str, output: str) -> list[Op]:
        return [
            linear(up, source, f"{prefix}up", hidden, ffn, bias=bias, prefix=prefix),
            Op("activation", "act", (f"{prefix}up",), f"{prefix}act", ffn, "tensor", slopes, function=function),
            linear(down, f"{prefix}act", output, ffn, hidden, bias=bias, parallel="row", prefix=prefix),
        ]

    return rows


def read_experts(keys: Keys, count_key: str, *more: str, top_k: str = "num_experts_per_tok") -> tuple[int, int]:
    """(experts, experts that a token takes), the second not above the first."""
    count = keys.whole(count_key, *more, most=MOST_EXPERTS)
    taken = keys.whole(top_k, most=MOST_EXPERTS)
    if taken > count:
        raise SpecError(f"a token takes {taken} of {count} experts", keys.where(top_k), [count])
    return count, taken


def experts(
    hidden: int,
    ffn: int,
    count: int,
    top_k: int,
    *,
    function: str = "silu",
    bias: bool = False,
    router: str = "gate",
    prefix: str = "mlp.",
    shared: Part | None = None,
    shared_gate: bool = False,
) -> Part:
    """A router and `count` gated experts of which each token takes `top_k`; weights are stacked over the experts for grouped products.

    `bias`: router and experts have biases (gpt-oss). `shared`: an MLP that every token passes, added to the routed sum; `shared_gate`
    scales it by the sigmoid of a product with one output (Qwen2-MoE).
    """

    def product(name: str, source: str, output: str, k: int, n: int, column: bool) -> Op:
        weights = [Weight(f"{prefix}experts.{name}.weight", (count, n, k), 1 if column else 2, 0)]
        if bias:
            weights.append(Weight(f"{prefix}experts.{name}.bias", (count, n), 1 if column else None, 0))
        return Op("grouped_linear", name, (source,), output, n, "tensor", tuple(weights), k=k, experts=count, top_k=top_k)

    def routed(source: str, output: str) -> list[Op]:
        weights = [Weight(f"{prefix}{router}.weight", (count, hidden))] + ([Weight(f"{prefix}{router}.bias", (count,))] if bias else [])
        return [
            Op("router", "router", (source,), "scores", count, "sequence", tuple(weights), k=hidden, experts=count, top_k=top_k),
            Op("dispatch", "dispatch", (source, "scores"), "routed", hidden, "sequence", experts=count, top_k=top_k),
            product("gate_proj", "routed", "expert_gate", hidden, ffn, True),
            product("up_proj", "routed", "expert_up", hidden, ffn, True),
            Op("activation", "expert_act", ("expert_gate",), "expert_act", ffn, "tensor", function=function, experts=count, top_k=top_k),
            Op("multiply", "expert_mul", ("expert_act", "expert_up"), "expert_product", ffn, "tensor", experts=count, top_k=top_k),
            product("down_proj", "expert_product", "expert_out", ffn, hidden, False),
            Op("combine", "combine", ("expert_out", "scores"), output, hidden, "sequence", experts=count, top_k=top_k),
        ]

    def rows(source: str, output: str) -> list[Op]:
        if shared is None:
            return routed(source, output)
        ops = [*routed(source, "routed_sum"), *shared(source, "shared_sum")]
        if shared_gate:
            ops += [
                linear("shared_expert_gate", source, "shared_logit", hidden, 1, parallel="replicated", prefix=prefix),
                activation("shared_gate", "shared_logit", "shared_scale", 1, "sigmoid", "sequence"),
                multiply("shared_mul", "shared_sum", "shared_scale", "shared_scaled", hidden, "sequence"),
            ]
        return [*ops, add("add_shared", "routed_sum", "shared_scaled" if shared_gate else "shared_sum", output, hidden)]

    return rows
