"""What families are made of: reading keys of a configuration, and the rows of attention, MLP and experts.

Every function returns `Op` rows; the order of rows is the order of execution and the order in which PyTorch registers the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError, nearest
from ..spec.blocks import Block, Op, Region, Weight
from ..spec.model import ModelSpec

MISSING = object()


def read(
    config: Mapping[str, Any],
    *names: str,
    default: Any = MISSING,
    least: int = 1,
    most: int = 2**40,
    name: str = "model",
) -> Any:
    """The first of `names` that the configuration has, as a whole number between `least` and `most`."""
    for key in names:
        if config.get(key) is not None:
            value = config[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
                raise SpecError(f"{str(value)[:40]!r} is not a whole number", f"{name}.{key}")
            if not least <= value <= most:
                raise SpecError(f"{value} is not between {least} and {most}", f"{name}.{key}")
            return int(value)
    if default is not MISSING:
        return default
    raise SpecError(f"{names[0]} is missing", name, nearest(names[0], config))


def flag(config: Mapping[str, Any], key: str, default: bool, name: str = "model") -> bool:
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SpecError(f"{str(value)[:40]!r} is not true or false", f"{name}.{key}")
    return value


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
    function: str = "",
) -> Op:
    """One product k -> n. `parallel`: column (outputs split), row (inputs split) or replicated."""
    tp_dim = {"column": 0, "row": 1, "replicated": None}[parallel]
    path = f"{prefix}{name}"
    weights = [Weight(f"{path}.weight", (n, k), tp_dim)]
    if bias:
        weights.append(Weight(f"{path}.bias", (n,), 0 if parallel == "column" else None))
    return Op(
        "linear",
        name,
        (source,),
        output,
        n,
        "tensor" if parallel == "column" else "sequence",
        tuple(weights),
        k=k,
        function=function,
    )


def norm(
    name: str,
    source: str,
    output: str,
    width: int,
    kind: str = "rms",
    *,
    bias: bool = False,
    heads: int = 0,
    path: str = "",
) -> Op:
    """A norm over `width` elements; with `heads` over each head's `width` elements (the output then has heads x width)."""
    path = path or name
    weights = [] if kind.endswith("no-weight") else [Weight(f"{path}.weight", (width,))]
    if bias:
        weights.append(Weight(f"{path}.bias", (width,)))
    region: Region = "tensor" if heads else "sequence"
    return Op(
        "norm",
        name,
        (source,),
        output,
        width * max(heads, 1),
        region,
        tuple(weights),
        function=kind,
        heads=heads,
        head_dim=width if heads else 0,
    )


def activation(name: str, source: str, output: str, width: int, function: str, region: str = "tensor") -> Op:
    return Op("activation", name, (source,), output, width, region, function=function)  # type: ignore[arg-type]


def multiply(name: str, a: str, b: str, output: str, width: int, region: str = "tensor") -> Op:
    return Op("multiply", name, (a, b), output, width, region)  # type: ignore[arg-type]


def add(name: str, a: str, b: str, output: str, width: int) -> Op:
    return Op("add", name, (a, b), output, width, "sequence")


def attention(
    source: str,
    output: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
    rope: bool = True,
    window: int | None = None,
    prefix: str = "self_attn.",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> list[Op]:
    """Multi-head, grouped-query (kv_heads < heads) or multi-query attention with its four projections.

    `qk_norm`: "" none, "head" a norm of head_dim on each head (Qwen3), "all" one over all heads together (OLMo 2).
    """
    if heads % kv_heads:
        raise SpecError(f"{heads} heads do not divide over {kv_heads} key-value heads", "model.num_key_value_heads")
    q_name, k_name, v_name, o_name = names
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    ops = [
        linear(q_name, source, "q", hidden, q_width, bias=qkv_bias, prefix=prefix),
        linear(k_name, source, "k", hidden, kv_width, bias=qkv_bias, prefix=prefix),
        linear(v_name, source, "v", hidden, kv_width, bias=qkv_bias, prefix=prefix),
    ]
    q, k = "q", "k"
    if qk_norm == "head":
        ops += [
            norm("q_norm", q, "q_n", head_dim, heads=heads, path=f"{prefix}q_norm"),
            norm("k_norm", k, "k_n", head_dim, heads=kv_heads, path=f"{prefix}k_norm"),
        ]
        q, k = "q_n", "k_n"
    elif qk_norm == "all":
        ops += [_norm_of_all("q_norm", q, "q_n", q_width, prefix), _norm_of_all("k_norm", k, "k_n", kv_width, prefix)]
        q, k = "q_n", "k_n"
    if rope:
        ops.append(
            Op(
                "rope",
                "rope",
                (q, k),
                "q_r",
                q_width + kv_width,
                "tensor",
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
        )
        q, k = "q_r", "k_r"
    ops.append(
        Op(
            "attention",
            "core_attn",
            (q, k, "v"),
            "attn",
            q_width,
            "tensor",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            window=window,
        )
    )
    ops.append(linear(o_name, "attn", output, q_width, hidden, bias=out_bias, parallel="row", prefix=prefix))
    return ops


def _norm_of_all(name: str, source: str, output: str, width: int, prefix: str) -> Op:
    return Op("norm", name, (source,), output, width, "tensor", (Weight(f"{prefix}{name}.weight", (width,)),), function="rms")


def gated_mlp(
    source: str,
    output: str,
    hidden: int,
    ffn: int,
    function: str = "silu",
    *,
    bias: bool = False,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Op]:
    """down(act(gate x) * up x)."""
    gate, up, down = names
    return [
        linear(gate, source, f"{prefix}gate", hidden, ffn, bias=bias, prefix=prefix),
        linear(up, source, f"{prefix}up", hidden, ffn, bias=bias, prefix=prefix),
        activation("act", f"{prefix}gate", f"{prefix}act", ffn, function),
        multiply("mul", f"{prefix}act", f"{prefix}up", f"{prefix}product", ffn),
        linear(down, f"{prefix}product", output, ffn, hidden, bias=bias, parallel="row", prefix=prefix),
    ]


def plain_mlp(
    source: str,
    output: str,
    hidden: int,
    ffn: int,
    function: str = "gelu",
    *,
    bias: bool = True,
    prefix: str = "mlp.",
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> list[Op]:
    """down(act(up x))."""
    up, down = names
    return [
        linear(up, source, f"{prefix}up", hidden, ffn, bias=bias, prefix=prefix),
        activation("act", f"{prefix}up", f"{prefix}act", ffn, function),
        linear(down, f"{prefix}act", output, ffn, hidden, bias=bias, parallel="row", prefix=prefix),
    ]


def experts(
    source: str,
    output: str,
    hidden: int,
    ffn: int,
    count: int,
    top_k: int,
    *,
    gated: bool = True,
    function: str = "silu",
    bias: bool = False,
    router_bias: bool = False,
    prefix: str = "mlp.",
) -> list[Op]:
    """A router and `count` experts of which each token takes `top_k`; weights are stacked over the experts, as grouped products want them."""
    if top_k > count:
        raise SpecError(f"{top_k} experts a token of {count}", "model.num_experts_per_tok")
    router = [Weight(f"{prefix}gate.weight", (count, hidden))]
    if router_bias:
        router.append(Weight(f"{prefix}gate.bias", (count,)))

    def product(name: str, inp: str, out: str, k: int, n: int, parallel: str) -> Op:
        column = parallel == "column"
        weights = [Weight(f"{prefix}experts.{name}.weight", (count, n, k), 1 if column else 2, 0)]
        if bias:
            weights.append(Weight(f"{prefix}experts.{name}.bias", (count, n), 1 if column else None, 0))
        return Op("grouped_linear", name, (inp,), out, n, "tensor", tuple(weights), k=k, experts=count, top_k=top_k)

    ops = [
        Op(
            "router",
            "router",
            (source,),
            "scores",
            count,
            "sequence",
            tuple(router),
            k=hidden,
            experts=count,
            top_k=top_k,
        ),
        Op("dispatch", "dispatch", (source, "scores"), "routed", hidden, "sequence", experts=count, top_k=top_k),
    ]
    if gated:
        ops += [
            product("gate_proj", "routed", "expert_gate", hidden, ffn, "column"),
            product("up_proj", "routed", "expert_up", hidden, ffn, "column"),
            Op(
                "activation",
                "expert_act",
                ("expert_gate",),
                "expert_act",
                ffn,
                "tensor",
                function=function,
                experts=count,
                top_k=top_k,
            ),
            Op(
                "multiply",
                "expert_mul",
                ("expert_act", "expert_up"),
                "expert_product",
                ffn,
                "tensor",
                experts=count,
                top_k=top_k,
            ),
            product("down_proj", "expert_product", "expert_out", ffn, hidden, "row"),
        ]
    else:
        ops += [
            product("up_proj", "routed", "expert_up", hidden, ffn, "column"),
            Op(
                "activation",
                "expert_act",
                ("expert_up",),
                "expert_act",
                ffn,
                "tensor",
                function=function,
                experts=count,
                top_k=top_k,
            ),
            product("down_proj", "expert_act", "expert_out", ffn, hidden, "row"),
        ]
    return [
        *ops,
        Op("combine", "combine", ("expert_out", "scores"), output, hidden, "sequence", experts=count, top_k=top_k),
    ]


def embedding(vocab: int, hidden: int, *, positions: int = 0, name: str = "embed_tokens", position_name: str = "embed_positions") -> Block:
    """The token table, and a table of learned positions where the model has one."""
    ops = [Op("embedding", name, (), "x", hidden, "sequence", (Weight(f"{name}.weight", (vocab, hidden), 0),))]
    if positions:
        table = Weight(f"{position_name}.weight", (positions, hidden), 0, tp_needs_sp=True)
        ops += [
            Op("embedding", position_name, (), "p", hidden, "sequence", (table,)),
            add("embed_add", "x", "p", "x", hidden),
        ]
    return Block("embedding", tuple(ops))


def head(
    vocab: int,
    hidden: int,
    tied: bool,
    *,
    kind: str = "rms",
    norm_bias: bool = False,
    bias: bool = False,
    norm_name: str = "norm",
) -> Block:
    """Final norm, output projection (no weight of its own where tied) and cross-entropy."""
    weights: tuple[Weight, ...] = () if tied else (Weight("lm_head.weight", (vocab, hidden), 0),)
    if bias:
        weights += (Weight("lm_head.bias", (vocab,), 0),)
    return Block(
        "head",
        (
            norm(norm_name, "x", "final", hidden, kind, bias=norm_bias),
            Op("linear", "lm_head", ("final",), "logits", vocab, "tensor", weights, k=hidden),
            Op("cross_entropy", "loss", ("logits",), "loss", vocab, "tensor"),
        ),
    )


def one_kind_of_layer(name: str, family: str, config: Mapping[str, Any], layer: Block, layers: int, **fields: Any) -> ModelSpec:
    """The common case: `layers` times the same block."""
    return ModelSpec(
        name=name,
        family=family,
        model_type=str(config.get("model_type", family)),
        blocks={layer.name: layer},
        layers=(layer.name,) * layers,
        config=dict(config),
        **fields,
    )
