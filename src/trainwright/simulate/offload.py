"""Offload: what lives in host memory, what crosses the link when, and the bandwidth at which it hides.

    optimizer    gradients go out as backward makes them, new weights come in before the next forward          ZeRO-Offload, Ren et al. 2021
    parameters   weights come in before every block's forward and backward, gradients go out, Adam runs there   ZeRO-Infinity, Rajbhandari et al. 2021
    activations  what a block leaves behind goes out after its forward and comes in before its backward

A transfer hides if it takes no longer than the computation beside it. With N parameters over n data-parallel GPUs, T tokens a GPU and step, F FLOP/s a GPU and
2-byte weights and gradients: forward takes 2 N T / F, backward twice that, and a rank owns 1/n of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError


@dataclass(frozen=True)
class Transfer:
    """Bytes of one GPU and step over its host link, and the computation beside which they travel."""

    what: str
    moves: str
    beside: str
    size_bytes: float
    window_s: float

    @property
    def hides_at_bytes_per_s(self) -> float:
        return self.size_bytes / self.window_s

    def exposed_s(self, bandwidth_bytes_per_s: float) -> float:
        """Seconds that remain visible at this bandwidth."""
        return max(0.0, self.size_bytes / bandwidth_bytes_per_s - self.window_s)


def transfers(
    parameters: float,
    gpus: int,
    tokens: float,
    flops_per_s: float,
    *,
    hidden: int,
    layers: int,
    saved_bytes_per_token_layer: float = 0.0,
    precision_bytes: int = 2,
) -> list[Transfer]:
    """Each kind of offload as `Transfer`s. `tokens` are those of one GPU and step; `saved_bytes_per_token_layer` 0 means one checkpoint: 2 bytes x hidden.

    hides_at of weights coming in is F / (n T) and of gradients going out F / (2 n T), whatever the model; of activations it does not depend on
    the batch: saved / (2 N / (layers F)).
    """
    for name, value in (
        ("parameters", parameters),
        ("gpus", gpus),
        ("tokens", tokens),
        ("flops_per_s", flops_per_s),
        ("hidden", hidden),
        ("layers", layers),
    ):
        if not 1e-6 < value < 1e24:
            raise SpecError(f"{value} is not a number above zero that a machine or a model has", name)
    forward = 2 * parameters * tokens / flops_per_s
    state = precision_bytes * parameters / gpus
    saved = (saved_bytes_per_token_layer or 2 * hidden) * tokens * layers
    return [
        Transfer("optimizer", "gradients to the host", "backward", state, 2 * forward),
        Transfer("optimizer", "new weights from the host", "next forward", state, forward),
        Transfer("parameters", "weights from the host", "forward", state, forward),
        Transfer("parameters", "weights from the host", "backward", state, 2 * forward),
        Transfer("parameters", "gradients to the host", "backward", state, 2 * forward),
        Transfer("activations", "saved tensors to the host", "forward", saved, forward),
        Transfer("activations", "saved tensors from the host", "backward", saved, 2 * forward),
    ]
