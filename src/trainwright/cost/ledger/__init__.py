"""Memory by published rules: Megatron-Core, DeepSpeed, FSDP1, and offload, quantized bases and mixtures of experts in every framework.

One flow: `weights` (elements on a rank) and `saved` (tensors of a block) -> `accounts` (what a framework holds of them) and `activations`
->
`engine` (moments of a step on each class of pipeline ranks) -> `MemoryTable`.
"""

from __future__ import annotations

from .engine import memory_rows, saved_by_layer

__all__ = ["memory_rows", "saved_by_layer"]
