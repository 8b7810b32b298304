"""What a ``config.json`` says beyond shapes: constants that the planner never needs and a real model cannot do without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SpecError
from ..spec.model import ModelSpec

# What a family's configuration class takes where the file does not say (transformers 5).
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 1e-5},
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6},
    "qwen2": {"rms_norm_eps": 1e-6},
    "qwen3": {"rms_norm_eps": 1e-6},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "norm_topk_prob": True},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "norm_topk_prob": False},
}


@dataclass(frozen=True)
class Numbers:
    """`eps` of the norms; rotary base and scaling; whether a router's chosen weights sum to one; rotated dims of a head."""

    eps: float
    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()
    normalize_top_k: bool = False
    rotated: int = 0

    def frequencies(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Angles a position, (rotated / 2): theta^(-2i/d), stretched as Llama 3 does (low frequencies by `factor`, a smooth step between) or by a factor."""
        made = self.theta ** -(torch.arange(0, self.rotated, 2, dtype=torch.float32, device=device) / self.rotated)
        scaling = dict(self.scaling)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "linear":
            return made / scaling["factor"]
        if kind != "llama3":
            return made
        low, high, old = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
        length = 2 * math.pi / made
        smooth = ((old / length - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * made / scaling["factor"] + smooth * made

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (batch or 1, tokens, 1, rotated), in fp32: one row a token, broadcast over heads."""
        angles = positions.unsqueeze(-1).float() * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos(), angles.sin()


def numbers_of(model: ModelSpec) -> Numbers:
    """Raises `SpecError` for a family whose arithmetic is not built here, named with those that are."""
    if model.model_type not in DEFAULTS:
        raise SpecError(f"{model.model_type!r} models can be planned, not trained here yet", "model.model_type", sorted(DEFAULTS))
    config = {**DEFAULTS[model.model_type], **model.config}
    eps = next(float(config[k]) for k in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") if k in config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise SpecError("is not a table", "model.rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise SpecError(f"no rotary scaling {kind!r} here", "model.rope_scaling", ["default", "linear", "llama3"])
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    rotated = next((op.head_dim for b in model.blocks.values() for op in b if op.kind == "rope"), 0)
    if not 0 < eps < 1 or theta <= 1:
        raise SpecError(f"eps {eps:g} or rope_theta {theta:g} is out of range", "model")
    return Numbers(eps, theta, tuple(sorted(rope.items())), bool(config.get("norm_topk_prob", False)), rotated)
