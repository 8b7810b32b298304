"""How parts are joined: the residual stream of a layer, the ends of a model, and the model itself.

In every layer ``x`` is what enters and the output of the last row what leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..spec.blocks import Block, Op, Weight
from ..spec.model import ModelSpec
from .keys import Keys
from .parts import Norm, Part, add, norm

INPUT_AND_POST = ("input_layernorm", "post_attention_layernorm")


def pre_norm(
    name: str, hidden: int, normed: Norm, attention: Part, mlp: Part, *, names: tuple[str, str] = INPUT_AND_POST, tags: Iterable[str] = ()
) -> Block:
    """x + attention(norm x), then + mlp(norm ...): GPT-2, Llama and most others."""
    rows = [
        normed(names[0], "x", "h1"),
        *attention("h1", "a"),
        add("residual_1", "x", "a", "x1", hidden),
        normed(names[1], "x1", "h2"),
        *mlp("h2", "m"),
        add("residual_2", "x1", "m", "x2", hidden),
    ]
    return Block(name, tuple(rows), frozenset(tags))


def post_norm(
    name: str, hidden: int, normed: Norm, attention: Part, mlp: Part, *, names: tuple[str, str], tags: Iterable[str] = ()
) -> Block:
    """x + norm(attention x), then + norm(mlp ...): OLMo 2."""
    rows = [
        *attention("x", "a"),
        normed(names[0], "a", "h1"),
        add("residual_1", "x", "h1", "x1", hidden),
        *mlp("x1", "m"),
        normed(names[1], "m", "h2"),
        add("residual_2", "x1", "h2", "x2", hidden),
    ]
    return Block(name, tuple(rows), frozenset(tags))


def after_norm(
    name: str, hidden: int, normed: Norm, attention: Part, mlp: Part, *, names: tuple[str, str], tags: Iterable[str] = ()
) -> Block:
    """norm(x + attention x), then norm(... + mlp ...): the first Transformer and OPT-350M."""
    rows = [
        *attention("x", "a"),
        add("residual_1", "x", "a", "s1", hidden),
        normed(names[0], "s1", "x1"),
        *mlp("x1", "m"),
        add("residual_2", "x1", "m", "s2", hidden),
        normed(names[1], "s2", "x2"),
    ]
    return Block(name, tuple(rows), frozenset(tags))


def sandwich(name: str, hidden: int, normed: Norm, attention: Part, mlp: Part, *, tags: Iterable[str] = ()) -> Block:
    """Norms before and after both parts: Gemma 2 and 3."""
    rows = [
        normed("input_layernorm", "x", "h1"),
        *attention("h1", "a"),
        normed("post_attention_layernorm", "a", "an"),
        add("residual_1", "x", "an", "x1", hidden),
        normed("pre_feedforward_layernorm", "x1", "h2"),
        *mlp("h2", "m"),
        normed("post_feedforward_layernorm", "m", "mn"),
        add("residual_2", "x1", "mn", "x2", hidden),
    ]
    return Block(name, tuple(rows), frozenset(tags))


def parallel(
    name: str,
    hidden: int,
    normed: Norm,
    attention: Part,
    mlp: Part,
    *,
    names: tuple[str, ...] = ("input_layernorm",),
    tags: Iterable[str] = (),
) -> Block:
    """x + attention(norm x) + mlp(norm x): GPT-J, GPT-NeoX, Falcon, Phi. Two names: the MLP has a norm of its own."""
    second = "h2" if len(names) > 1 else "h1"
    rows = [normed(n, "x", h) for n, h in zip(names, ("h1", "h2"), strict=False)]
    rows += [
        *attention("h1", "a"),
        *mlp(second, "m"),
        add("parallel_sum", "a", "m", "am", hidden),
        add("residual", "x", "am", "x2", hidden),
    ]
    return Block(name, tuple(rows), frozenset(tags))


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
    vocab: int, hidden: int, tied: bool, *, kind: str = "rms", norm_bias: bool = False, bias: bool = False, norm_name: str = "norm"
) -> Block:
    """Final norm, output projection (no weight of its own where tied) and cross-entropy."""
    final = norm(norm_name, "x", "final", hidden, kind, bias=norm_bias)
    return Block("head", (final, *logits("final", vocab, hidden, tied, bias=bias)))


def logits(source: str, vocab: int, hidden: int, tied: bool, *, bias: bool = False) -> list[Op]:
    weights: tuple[Weight, ...] = () if tied else (Weight("lm_head.weight", (vocab, hidden), 0),)
    if bias:
        weights += (Weight("lm_head.bias", (vocab,), 0),)
    return [
        Op("linear", "lm_head", (source,), "logits", vocab, "tensor", weights, k=hidden),
        Op("cross_entropy", "loss", ("logits",), "loss", vocab, "tensor"),
    ]


def make(keys: Keys, family: str, layers: Sequence[Block], *, notes: tuple[str, ...] = (), **fields: Any) -> ModelSpec:
    """A model from the block of each layer, first to last; blocks of one name are one block. `fields` are those of `ModelSpec`."""
    return ModelSpec(
        name=keys.name,
        family=family,
        model_type=str(keys.config.get("model_type", family)),
        blocks={block.name: block for block in layers},
        layers=tuple(block.name for block in layers),
        config=dict(keys.config),
        notes=(*notes, *keys.notes()),
        **fields,
    )


def by_kind(layers: int, kind_of: Callable[[int], Any], block_of: Callable[[Any], Block]) -> list[Block]:
    """The block of each layer where layers differ by a kind: `block_of` is called once a kind."""
    made: dict[Any, Block] = {}
    kinds = [kind_of(index) for index in range(layers)]
    for kind in kinds:
        if kind not in made:
            made[kind] = block_of(kind)
    return [made[kind] for kind in kinds]


def ends(
    keys: Keys,
    hidden: int,
    *,
    tied: bool = False,
    kind: str = "rms",
    norm_bias: bool = False,
    bias: bool = False,
    norm_name: str = "norm",
    embed: str = "embed_tokens",
) -> dict[str, Any]:
    """Embedding and head of a model without learned positions, as fields of `ModelSpec`. `tied` is the family's default."""
    vocab, tied = keys.vocab(), keys.tied(tied)
    return {
        "hidden": hidden,
        "vocab": vocab,
        "max_positions": keys.positions(),
        "tied": tied,
        "embedding": embedding(vocab, hidden, name=embed),
        "head": head(vocab, hidden, tied, kind=kind, norm_bias=norm_bias, bias=bias, norm_name=norm_name),
    }


def label(*words: str) -> str:
    """The name of a block: ``layer``, ``layer_sliding``, ``layer_sliding_moe``; empty words are left out."""
    return "_".join(["layer", *(w for w in words if w)])


def rope_buffers(rotary_dim: int) -> int:
    """Bytes of the fp32 frequencies that PyTorch keeps once a model: ``inv_freq`` and ``original_inv_freq`` of rotary_dim / 2 each."""
    return 2 * (rotary_dim // 2) * 4
