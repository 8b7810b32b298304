"""The small transformer that is simulated: its shape, its parameters, and along which dim each parameter is cut.

Units, in order: 0 the embedding, 1 to `layers` the blocks, `layers` + 1 the final norm and head. A block is what FSDP gathers, what is
recomputed, and what a pipeline stage is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import SpecError
from .collectives import Array, bounds, split_sizes


@dataclass(frozen=True)
class TinyConfig:
    """A transformer small enough to run in milliseconds, with every part that a large one has.

    `kv_heads` < `heads` is grouped-query attention; `gated` is SwiGLU (else GELU); `norm` rms or layer; `positions` rope or learned; `experts` > 0 makes
    every feed-forward a mixture with `top_k` of them per token, and `capacity_factor` drops what is over an expert's capacity.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    ffn: int = 24
    vocab: int = 37
    gated: bool = True
    norm: str = "rms"
    positions: str = "rope"
    tied: bool = False
    bias: bool = False
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    max_length: int = 64

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise SpecError(f"{getattr(self, name)} is not a positive number", name, "1")
        if self.heads % self.kv_heads:
            legal = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise SpecError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly", "kv_heads", legal)
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise SpecError(f"top_k {self.top_k} of {self.experts} experts", "top_k", [self.experts])
        if self.positions == "rope" and self.head_dim % 2:
            raise SpecError(f"rotary positions turn pairs; head_dim {self.head_dim} is odd", "head_dim", [self.head_dim + 1])

    @property
    def head_unit(self) -> int:
        return self.layers + 1

    @property
    def parameter_count(self) -> int:
        return sum(int(np.prod(p.shape)) for p in parameters(self))


@dataclass(frozen=True)
class Parameter:
    """One weight. `split` says {axis: (dim, unit)}: the axis cuts that dim into whole units (a head's columns stay together).

    Where there are more ranks than units, `finer` is the unit instead (queries that share a key-value head part), or, without one, neighboring
    ranks hold copies of one unit (the key-value head itself).

    `tp_partial`: whether each tensor-parallel rank computes only its part of this (uncut) weight's gradient: ``never``, ``sequence`` (under sequence
    parallelism, where each rank sees other tokens) or ``always`` (inside a tensor-parallel region, as a router is).
    """

    name: str
    shape: tuple[int, ...]
    unit: int
    split: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tp_partial: str = "never"
    finer: int = 0

    @property
    def expert(self) -> bool:
        return "ep" in self.split

    def cut(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[slice, ...]:
        """This rank's part of the full weight as slices: `sizes` of the axes and `at` which position."""
        slices = [slice(None)] * len(self.shape)
        for axis, (dim, unit) in self.split.items():
            if sizes[axis] > self.shape[dim] // unit and self.finer:
                unit = self.finer
            units = self.shape[dim] // unit
            pieces = min(units, sizes[axis])
            lo, hi = bounds(units, pieces)[at[axis] * pieces // sizes[axis]]
            slices[dim] = slice(lo * unit, hi * unit)
        return tuple(slices)

    def copied(self, ranks: int) -> bool:
        """Whether `ranks` tensor-parallel ranks are more than there are pieces, so that neighbors hold the same one."""
        return "tp" in self.split and not self.finer and self.shape[self.split["tp"][0]] // self.split["tp"][1] < ranks


def parameters(config: TinyConfig) -> list[Parameter]:
    """Every parameter in forward order; a tied head has none of its own."""
    h, v = config.hidden, config.vocab
    found = [Parameter("embedding", (v, h), 0, {"tp": (0, 1)})]
    if config.positions == "learned":
        found.append(Parameter("positions", (config.max_length, h), 0, tp_partial="sequence"))
    for i in range(1, config.layers + 1):
        found += _block(config, i)
    found += _norm(config, "final_norm", config.head_unit)
    if not config.tied:
        found.append(Parameter("head", (h, v), config.head_unit, {"tp": (1, 1)}))
    return found


def _norm(config: TinyConfig, name: str, unit: int) -> list[Parameter]:
    weights = [Parameter(f"{name}.scale", (config.hidden,), unit, tp_partial="sequence")]
    if config.norm == "layer":
        weights.append(Parameter(f"{name}.shift", (config.hidden,), unit, tp_partial="sequence"))
    return weights


def _block(config: TinyConfig, i: int) -> list[Parameter]:
    h, d, f, e = config.hidden, config.head_dim, config.ffn, config.experts
    group = config.heads // config.kv_heads * d
    at = f"{i}."
    found = [*_norm(config, at + "attention_norm", i)]
    found.append(Parameter(at + "q", (h, config.heads * d), i, {"tp": (1, group)}, finer=d))
    found += [Parameter(at + n, (h, config.kv_heads * d), i, {"tp": (1, d)}) for n in ("k", "v")]
    found.append(Parameter(at + "o", (config.heads * d, h), i, {"tp": (0, group)}, finer=d))
    if config.bias:  # no key bias: softmax cancels it, its gradient is zero
        found += [
            Parameter(at + "q.bias", (config.heads * d,), i, {"tp": (0, group)}, finer=d),
            Parameter(at + "v.bias", (config.kv_heads * d,), i, {"tp": (0, d)}),
            Parameter(at + "o.bias", (h,), i, tp_partial="sequence"),
        ]
    found += _norm(config, at + "ffn_norm", i)
    columns = ("gate", "up") if config.gated else ("up",)
    if e:
        found.append(Parameter(at + "router", (h, e), i, tp_partial="always"))
        found += [Parameter(at + "experts." + n, (e, h, f), i, {"ep": (0, 1), "tp": (2, 1)}) for n in columns]
        return [*found, Parameter(at + "experts.down", (e, f, h), i, {"ep": (0, 1), "tp": (1, 1)})]
    found += [Parameter(at + n, (h, f), i, {"tp": (1, 1)}) for n in columns]
    found.append(Parameter(at + "down", (f, h), i, {"tp": (0, 1)}))
    if config.bias:
        found += [Parameter(at + "up.bias", (f,), i, {"tp": (0, 1)}), Parameter(at + "down.bias", (h,), i, tp_partial="sequence")]
    return found


def local_heads(config: TinyConfig, tp: int, tp_rank: int) -> tuple[int, int]:
    """(query heads, key-value heads) of a tensor-parallel rank: whole groups, or part of the queries of one key-value head."""
    if tp > config.kv_heads:
        return config.heads // tp, 1
    kv_heads = split_sizes(config.kv_heads, tp)[tp_rank]
    return kv_heads * config.heads // config.kv_heads, kv_heads


def generator(*seed: int) -> np.random.Generator:
    """A random generator; `SpecError` where the seed is not one."""
    if any(not isinstance(s, int) or s < 0 for s in seed):
        raise SpecError(f"{seed[0]!r} is not a whole number of at least 0", "seed", "0")
    return np.random.default_rng(seed)


def initial(config: TinyConfig, seed: int = 0, dtype: Any = np.float64) -> dict[str, Array]:
    """Random weights: normal with standard deviation 1/sqrt(fan in), norms near 1, biases small; the same for the same seed."""
    random = generator(seed)
    weights: dict[str, Array] = {}
    for p in parameters(config):
        value = random.standard_normal(p.shape)
        if p.name.endswith("scale"):
            value = 1 + 0.1 * value
        elif len(p.shape) == 1:
            value = 0.1 * value
        elif p.name in ("embedding", "positions"):
            value = value / (np.sqrt(config.hidden) if config.tied else 1)
        else:
            value = value / np.sqrt(p.shape[-2])
        weights[p.name] = value.astype(dtype)
    return weights


@dataclass(frozen=True)
class Batch:
    """`tokens` and `targets`, (sequences, length) whole numbers; a target of -1 is padding and has no loss."""

    tokens: Array
    targets: Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1]


def random_batch(config: TinyConfig, batch: int = 8, length: int = 16, seed: int = 0, padded: bool = False) -> Batch:
    """Random tokens; with `padded` each sequence is followed by padding from a different place, so token counts are unequal."""
    if batch < 1 or length < 1:
        raise SpecError(f"a batch of {batch} sequences of {length} tokens is empty", "batch", "1")
    random = generator(seed, 1)
    text = random.integers(0, config.vocab, (batch, length + 1))
    targets = text[:, 1:].copy()
    if padded:
        keep = random.integers(max(1, length // 4), length + 1, batch)
        targets[np.arange(length)[None, :] >= keep[:, None]] = -1
    return Batch(text[:, :-1].copy(), targets)
